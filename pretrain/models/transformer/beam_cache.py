"""Keys and values of hypotheses that begin alike and are reordered, stored without copies."""

import torch
from torch import Tensor

from multihop.pretrain.models.cpu.few_queries import attend_from_few
from multihop.pretrain.models.layers.cross_attention import keep_rows
from multihop.pretrain.models.transformer.config import TransformerConfig

_TOKENS_AT_FIRST = 32
"""For how many tokens of all hypotheses there is room at the beginning."""


class BeamCache:
    """Keys and values of the tokens of S sentences with K hypotheses each.

    A token stays in the column of its sentence in which it was computed, and a mask says which columns are the tokens
    of a hypothesis. So a hypothesis that replaces another costs a row of the mask, and a beginning that
    several share is kept, and read, once. Where there is no room for a step, columns that nobody sees any more go.
    """

    def __init__(
        self, config: TransformerConfig, sentences: int, beams: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        room = _TOKENS_AT_FIRST * beams
        self._beams = beams
        sizes = (config.layers, 2, sentences, config.heads, room, config.hidden // config.heads)
        self._kept = torch.empty(sizes, device=device, dtype=dtype)
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
        query, key, value = (
            part.view(len(self._seen), self._beams, self._kept.shape[3], -1).transpose(1, 2)
            for part in (query, key, value)
        )
        keys, values = self._kept[layer, ..., : self._columns, :]
        keys[..., -self._beams :, :], values[..., -self._beams :, :] = key, value
        attended = attend_from_few(query, keys, values, self._seen[:, None, :, : self._columns])
        return attended.transpose(1, 2).reshape(len(self._seen) * self._beams, -1)

    def reorder(self, hypotheses: Tensor) -> None:
        """See `DecoderState.reorder`."""
        self._seen = self._seen.flatten(0, 1).index_select(0, hypotheses).view(self._seen.shape)

    def keep(self, sentences: Tensor) -> None:
        """See `DecoderState.keep`."""
        self._kept = keep_rows(self._kept, sentences, dim=2)
        self._seen = keep_rows(self._seen, sentences)

    def _make_room(self) -> None:
        """The columns that are seen move to the front; there is at least as much room for others as for them."""
        seen = self._seen.any(1)
        columns = int(seen.sum(1).max())
        order = seen.int().argsort(dim=1, descending=True, stable=True)[:, :columns]
        room = max(self._seen.shape[2], 2 * columns)
        sentences, heads, old_room, width = self._kept.shape[2:]
        first = torch.arange(sentences * heads, device=order.device).view(sentences, heads, 1) * old_room
        rows = (first + order[:, None]).flatten()
        old, kept = self._kept, self._kept
        if room > old_room:
            kept = old.new_empty(*old.shape[:4], room, width)
        each_old, each_kept = (of.view(-1, sentences, heads, of.shape[4], width) for of in (old, kept))
        for before, after in zip(each_old, each_kept, strict=True):
            left = before.view(-1, width).index_select(0, rows)
            after[:, :, :columns] = left.view(sentences, heads, columns, width)
        mask = self._seen.new_zeros(sentences, self._beams, room)
        mask[..., :columns] = self._seen.gather(2, order[:, None].expand(-1, self._beams, -1))
        self._kept, self._seen, self._columns = kept, mask, columns
