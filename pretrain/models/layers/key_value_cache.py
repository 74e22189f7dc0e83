"""Keys and values of the tokens of a text, kept so that the next one is computed alone (Shazeer 2019, section 2.4)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.models.config import AttentionConfig
from multihop.pretrain.models.relative_positions import spread


class KeyValueCache:
    """The keys and values of S sequences in all layers of a causal model, with room for the tokens to come.

    The first `encode` with it reads the prompts, packed; each later one, after `advance`, a token of each sequence.
    The prompts end in the same column, so that all sequences grow by the same one. Prompts of no tokens are not read:
    `advance` comes first. Layers with a sliding window keep only the tokens within it: column c is at c modulo the
    window's size.
    """

    def __init__(
        self,
        config: AttentionConfig,
        lengths: Sequence[int],
        new_tokens: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Args: lengths: of the prompts, in tokens; new_tokens: how many more there is room for at first."""
        longest = max(lengths)
        windows = config.causal_windows()
        self._sizes = [None if window is None else window + 1 for window in windows]
        self._kept = {
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
        self._number = [self._sizes[:layer].count(size) for layer, size in enumerate(self._sizes)]
        each = torch.tensor(lengths, device=device)
        self._rows = torch.repeat_interleave(each)
        before = torch.repeat_interleave(each.cumsum(0) - longest, each)
        self._columns = torch.arange(len(self._rows), device=device) - before
        self._first = longest - each if min(lengths) < longest else None
        self._length, self._layer, self.is_decoding = longest, -1 if longest else config.layers - 1, False

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, the one that is being computed included."""
        return self._length

    def advance(self) -> None:
        """The next `encode` has the token after those before, of each sequence."""
        assert self._layer == len(self._sizes) - 1, "the model has fewer or more layers"
        self._length, self._layer, self.is_decoding = self._length + 1, -1, True
        if None in self._kept and self._length > self._kept[None].shape[4]:
            self._kept[None] = F.pad(self._kept[None], (0, 0, 0, self._length))  # twice the room

    def select(self, sequences: Tensor) -> None:
        """Sequence i becomes the one that was at sequences[i], int64 (S',)."""
        for size, kept in self._kept.items():
            used = min(self._length, kept.shape[4])
            selected = kept.new_empty(*kept.shape[:2], len(sequences), *kept.shape[3:])
            selected[..., :used, :] = kept[..., :used, :].index_select(2, sequences)
            self._kept[size] = selected
        if self._first is not None:
            self._first = self._first.index_select(0, sequences)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values, (N, heads, width), of the next layer."""
        self._layer += 1
        size = self._sizes[self._layer]
        rows, columns = self._rows, self._columns
        if size is not None and not self.is_decoding:
            near = (columns >= self._length - size).nonzero()[:, 0]
            rows, columns, key, value = rows[near], columns[near] % size, key[near], value[near]
        for kept, new in zip(self._kept[size][self._number[self._layer]], (key, value), strict=True):
            if self.is_decoding:
                kept[:, :, (self._length - 1) % (size or self._length)] = new
            else:
                kept[rows, :, columns] = new

    def attend(self, query: Tensor, relative: Tensor | None = None) -> Tensor:
        """Attention of the last token of each sequence to all of its tokens, or those within the layer's window:
        (S, heads, width) -> the same.

        Args:
            relative: (S, heads, C), as in `attention.attend`.
        """
        size = self._sizes[self._layer]
        used = min(self._length, size or self._length)
        key, value = self._kept[size][self._number[self._layer], :, :, :, :used]
        mask = None
        if self._first is not None:
            columns = torch.arange(used, device=query.device)
            if size is not None:  # the newest column whose place this is
                columns = self._length - 1 - (self._length - 1 - columns) % size
            mask = (columns >= self._first[:, None])[:, None, None]
        if relative is not None:
            last = torch.tensor([self._length - 1], device=query.device)
            # Prompts end in the same column, so that columns differ as positions do.
            added = spread(relative[:, :, None], last, self._length, causal=True) * query.shape[-1] ** -0.5
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(query[:, :, None], key, value, attn_mask=mask)[:, :, 0]
