"""Keys and values of hypotheses that begin alike and change places, kept without copies."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pretrain.models.common.cross_attention import keep_rows
from pretrain.models.config import ModelConfig

_TOKENS_AT_FIRST = 16
"""For how many tokens of all hypotheses there is room at the beginning."""


class BeamCache:
    """Of the tokens of S sentences with K hypotheses each.

    A token stays in the column of its sentence in which it was computed, and a mask says which columns are the tokens
    of a hypothesis. So a hypothesis that takes the place of another costs a row of the mask, and a beginning that
    several share is kept, and read, once. Where there is no room for a step, columns that nobody sees any more go.
    """

    def __init__(
        self, config: ModelConfig, sentences: int, beams: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        room = _TOKENS_AT_FIRST * beams
        self._heads, self._beams = config.heads, beams
        self._kept = torch.empty(config.layers, 2, sentences, room, config.hidden, device=device, dtype=dtype)
        self._seen = torch.zeros(sentences, beams, room, dtype=torch.bool, device=device)
        self._columns = self.length = 0
        """`length`: tokens of a hypothesis."""

    def advance(self) -> None:
        """The next token of each hypothesis."""
        if self._columns + self._beams > self._seen.shape[2]:
            self._make_room()
        start, self._columns, self.length = self._columns, self._columns + self._beams, self.length + 1
        self._seen[:, :, start : self._columns] = torch.eye(self._beams, dtype=torch.bool, device=self._seen.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the newest token of each hypothesis to it and those before it: (S * K, H) each -> (S * K, H)."""
        rows = (len(self._seen), self._beams)
        for kept, new in zip(self._kept[layer], (key, value), strict=True):
            kept[:, self._columns - self._beams : self._columns] = new.view(*rows, -1)
        q, k, v = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2)
            for part in (query.view(*rows, -1), *self._kept[layer, :, :, : self._columns])
        )
        mask = self._seen[:, None, :, : self._columns]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(query.shape)

    def reorder(self, hypotheses: Tensor) -> None:
        """As `DecoderState.reorder`."""
        self._seen = self._seen.flatten(0, 1).index_select(0, hypotheses).view(self._seen.shape)

    def keep(self, sentences: Tensor) -> None:
        """As `DecoderState.keep`."""
        self._kept = keep_rows(self._kept, sentences, dim=2)
        self._seen = keep_rows(self._seen, sentences)

    def _make_room(self) -> None:
        """The columns that are seen move to the front; beside them there is as much room again."""
        seen = self._seen.any(1)
        columns = int(seen.sum(1).max())
        order = seen.int().argsort(dim=1, descending=True, stable=True)[:, :columns]
        room = max(self._seen.shape[2], 2 * columns)
        flat = (order + torch.arange(len(order), device=order.device)[:, None] * self._seen.shape[2]).flatten()
        kept = self._kept.new_empty(*self._kept.shape[:3], room, self._kept.shape[4])
        kept[..., :columns, :] = self._kept.flatten(2, 3).index_select(2, flat).view(*kept.shape[:3], columns, -1)
        mask = self._seen.new_zeros(*self._seen.shape[:2], room)
        mask[..., :columns] = self._seen.gather(2, order[:, None].expand(-1, self._beams, -1))
        self._kept, self._seen, self._columns = kept, mask, columns
