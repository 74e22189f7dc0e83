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
    empty, call `advance` before the first `encode`.
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
        shape = (config.layers, 2, len(lengths), config.heads, longest + new_tokens, config.hidden // config.heads)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        prompt_lengths = torch.tensor(lengths, device=device)
        self._rows = torch.repeat_interleave(prompt_lengths)
        before = torch.repeat_interleave(prompt_lengths.cumsum(0) - longest, prompt_lengths)
        self._columns = torch.arange(len(self._rows), device=device) - before
        self._visible = None
        if min(lengths) < longest:
            self._visible = (torch.arange(longest + new_tokens, device=device) >= longest - prompt_lengths[:, None])[
                :, None, None
            ]
        self._length, self._layer, self.is_decoding = longest, -1 if longest else config.layers - 1, False

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, including the current one."""
        return self._length

    def advance(self) -> None:
        """Make room for the next token of each sequence, which the next `encode` takes."""
        assert self._layer == len(self._cache) - 1, "the model has fewer or more layers"
        self._length, self._layer, self.is_decoding = self._length + 1, -1, True
        if self._length > self._cache.shape[4]:
            self._cache = F.pad(self._cache, (0, 0, 0, self._length))  # doubled
            if self._visible is not None:
                self._visible = F.pad(self._visible, (0, self._length), value=True)

    def select(self, sequences: Tensor) -> None:
        """Select sequences, int64 (S',), in this order."""
        cached = self._cache.new_empty(*self._cache.shape[:2], len(sequences), *self._cache.shape[3:])
        cached[..., : self._length, :] = self._cache[..., : self._length, :].index_select(2, sequences)
        self._cache = cached
        if self._visible is not None:
            self._visible = self._visible.index_select(0, sequences)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store the keys and values, (N, heads, width), of the next layer."""
        self._layer += 1
        for cached, new in zip(self._cache[self._layer], (key, value), strict=True):
            if self.is_decoding:
                cached[:, :, self._length - 1] = new
            else:
                cached[self._rows, :, self._columns] = new

    def attend(self, query: Tensor, relative: Tensor | None = None) -> Tensor:
        """Attention of the last token of each sequence to all tokens of the sequence: (S, heads, width) -> the same.

        Args:
            relative: (S, heads, C), as in `attention.attend`.
        """
        key, value = self._cache[self._layer, :, :, :, : self._length]
        mask = None if self._visible is None else self._visible[..., : self._length]
        if relative is not None:
            last = torch.tensor([self._length - 1], device=query.device)
            # With padding on the left, columns differ by as much as positions do.
            bias = expand_by_distance(relative[:, :, None], last, self._length, causal=True) * query.shape[-1] ** -0.5
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(query[:, :, None], key, value, attn_mask=mask)[:, :, 0]
