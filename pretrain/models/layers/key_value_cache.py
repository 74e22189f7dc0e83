"""A key-value cache: generating a token computes that token alone (Shazeer 2019, section 2.4)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.models.config import AttentionConfig
from multihop.pretrain.models.relative_positions import expand_by_distance


class KeyValueCache:
    """The keys and values of S sequences in all layers of a causal model, with room for new tokens.

    The first `encode` with it takes the packed prompts; each later one, after `advance`, a token of each sequence. The
    prompts are padded on the left, so that each new token is in the same column for all sequences. If all prompts are
    empty, call `advance` before the first `encode`. A layer with a sliding window stores the tokens within it only, in
    a ring buffer: the token in column c at c modulo the buffer's size.
    """

    def __init__(
        self,
        config: AttentionConfig,
        lengths: Sequence[int],
        new_tokens: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the cache.

        Args:
            lengths: tokens of each prompt.
            new_tokens: number of new tokens for which memory is allocated at first.
        """
        longest = max(lengths)
        # A window may be wider than any text.
        windows = (None if window is None else min(window, config.max_positions) for window in config.causal_windows())
        self._sizes = [None if window is None else window + 1 for window in windows]
        self._indexes = [self._sizes[:layer].count(size) for layer, size in enumerate(self._sizes)]
        self._caches = {
            size: torch.zeros(
                self._sizes.count(size),
                2,
                len(lengths),
                config.heads,
                longest + new_tokens if size is None else size,
                config.hidden // config.heads,
                device=device,
                dtype=dtype,
            )
            for size in set(self._sizes)
        }
        prompt_lengths = torch.tensor(lengths, device=device)
        self._rows = torch.repeat_interleave(prompt_lengths)
        before = torch.repeat_interleave(prompt_lengths.cumsum(0) - longest, prompt_lengths)
        self._columns = torch.arange(len(self._rows), device=device) - before
        self._first_columns = longest - prompt_lengths if min(lengths) < longest else None
        self._length, self._layer, self.is_decoding = longest, -1 if longest else config.layers - 1, False

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, including the current one."""
        return self._length

    def advance(self) -> None:
        """Make room for the next token of each sequence, which the next `encode` takes."""
        assert self._layer == len(self._sizes) - 1, "the model has fewer or more layers"
        self._length, self._layer, self.is_decoding = self._length + 1, -1, True
        if None in self._caches and self._length > self._caches[None].shape[4]:
            self._caches[None] = F.pad(self._caches[None], (0, 0, 0, self._length))  # doubled

    def select(self, sequences: Tensor) -> None:
        """Select sequences, int64 (S',), in this order."""
        for size, cache in self._caches.items():
            used = min(self._length, cache.shape[4])
            selected = cache.new_empty(*cache.shape[:2], len(sequences), *cache.shape[3:])
            selected[..., :used, :] = cache[..., :used, :].index_select(2, sequences)
            self._caches[size] = selected
        if self._first_columns is not None:
            self._first_columns = self._first_columns.index_select(0, sequences)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store the keys and values, (N, heads, width), of the next layer."""
        self._layer += 1
        size, rows, columns = self._sizes[self._layer], self._rows, self._columns
        if size is not None and not self.is_decoding:
            near = (columns >= self._length - size).nonzero()[:, 0]
            rows, columns, key, value = rows[near], columns[near] % size, key[near], value[near]
        for cached, new in zip(self._layer_cache(), (key, value), strict=True):
            if self.is_decoding:
                cached[:, :, (self._length - 1) % (size or self._length)] = new
            else:
                cached[rows, :, columns] = new

    def attend(self, query: Tensor, relative: Tensor | None = None) -> Tensor:
        """Attention of the last token of each sequence to its tokens, or to those within the layer's window:
        (S, heads, width) -> the same.

        Args:
            relative: (S, heads, C), as in `attention.attend`.
        """
        size = self._sizes[self._layer]
        used = min(self._length, size or self._length)
        key, value = self._layer_cache()[:, :, :, :used]
        mask = None
        if self._first_columns is not None:
            columns = torch.arange(used, device=query.device)
            if size is not None:  # the newest column that is stored at each place of the ring
                columns = self._length - 1 - (self._length - 1 - columns) % size
            mask = (columns >= self._first_columns[:, None])[:, None, None]
        if relative is not None:
            last = torch.tensor([self._length - 1], device=query.device)
            # With padding on the left, columns differ by as much as positions do.
            bias = expand_by_distance(relative[:, :, None], last, self._length, causal=True) * query.shape[-1] ** -0.5
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(query[:, :, None], key, value, attn_mask=mask)[:, :, 0]

    def _layer_cache(self) -> Tensor:
        """(2, S, heads, T, width): the keys and values of the current layer."""
        return self._caches[self._sizes[self._layer]][self._indexes[self._layer]]
