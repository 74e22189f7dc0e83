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
    `advance` comes first.
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
        shape = (config.layers, 2, len(lengths), config.heads, longest + new_tokens, config.hidden // config.heads)
        self._kept = torch.zeros(shape, device=device, dtype=dtype)
        each = torch.tensor(lengths, device=device)
        self._rows = torch.repeat_interleave(each)
        before = torch.repeat_interleave(each.cumsum(0) - longest, each)
        self._columns = torch.arange(len(self._rows), device=device) - before
        self._seen = None
        if min(lengths) < longest:
            self._seen = (torch.arange(longest + new_tokens, device=device) >= longest - each[:, None])[:, None, None]
        self._length, self._layer, self.is_decoding = longest, -1 if longest else config.layers - 1, False

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, the one that is being computed included."""
        return self._length

    def advance(self) -> None:
        """The next `encode` has the token after those before, of each sequence."""
        assert self._layer == len(self._kept) - 1, "the model has fewer or more layers"
        self._length, self._layer, self.is_decoding = self._length + 1, -1, True
        if self._length > self._kept.shape[4]:
            self._kept = F.pad(self._kept, (0, 0, 0, self._length))  # twice the room
            if self._seen is not None:
                self._seen = F.pad(self._seen, (0, self._length), value=True)

    def select(self, sequences: Tensor) -> None:
        """Sequence i becomes the one that was at sequences[i], int64 (S',)."""
        kept = self._kept.new_empty(*self._kept.shape[:2], len(sequences), *self._kept.shape[3:])
        kept[..., : self._length, :] = self._kept[..., : self._length, :].index_select(2, sequences)
        self._kept = kept
        if self._seen is not None:
            self._seen = self._seen.index_select(0, sequences)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values, (N, heads, width), of the next layer."""
        self._layer += 1
        for kept, new in zip(self._kept[self._layer], (key, value), strict=True):
            if self.is_decoding:
                kept[:, :, self._length - 1] = new
            else:
                kept[self._rows, :, self._columns] = new

    def attend(self, query: Tensor, relative: Tensor | None = None) -> Tensor:
        """Attention of the last token of each sequence to all of its tokens: (S, heads, width) -> the same.

        Args:
            relative: (S, heads, C), as in `attention.attend`.
        """
        key, value = self._kept[self._layer, :, :, :, : self._length]
        mask = None if self._seen is None else self._seen[..., : self._length]
        if relative is not None:
            last = torch.tensor([self._length - 1], device=query.device)
            # Prompts end in the same column, so that columns differ as positions do.
            added = spread(relative[:, :, None], last, self._length, causal=True) * query.shape[-1] ** -0.5
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(query[:, :, None], key, value, attn_mask=mask)[:, :, 0]
