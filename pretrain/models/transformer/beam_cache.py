"""A key-value cache for beam search, which shares common prefixes and reorders hypotheses without copies."""

import torch
from torch import Tensor

from multihop.pretrain.models.cpu.few_queries import few_query_attention
from multihop.pretrain.models.layers.cross_attention import select_rows_
from multihop.pretrain.models.transformer.config import TransformerConfig

_INITIAL_TOKENS = 32
"""Tokens of each hypothesis for which memory is allocated at first."""


class BeamCache:
    """Keys and values of the tokens of S sentences with K hypotheses each.

    A token stays in the column of its sentence in which it was computed, and a mask says which columns hold the tokens
    of a hypothesis. So replacing a hypothesis by another only copies a row of the mask, and a prefix that several
    share is stored and read once. When the columns are full, those that no hypothesis uses are removed.
    """

    def __init__(
        self, config: TransformerConfig, sentences: int, beams: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        room = _INITIAL_TOKENS * beams
        self._beams = beams
        sizes = (config.layers, 2, sentences, config.heads, room, config.hidden // config.heads)
        self._cache = torch.empty(sizes, device=device, dtype=dtype)
        self._used = torch.zeros(sentences, beams, room, dtype=torch.bool, device=device)
        self._columns = self.length = 0
        """`length`: tokens per hypothesis."""

    def advance(self) -> None:
        """Make room for the next token of each hypothesis."""
        if self._columns + self._beams > self._used.shape[2]:
            self._make_room()
        start, self._columns, self.length = self._columns, self._columns + self._beams, self.length + 1
        self._used[:, :, start : self._columns] = torch.eye(self._beams, dtype=torch.bool, device=self._used.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the newest token of each hypothesis to itself and those before it: (S * K, H) -> (S * K, H)."""
        query, key, value = (
            part.view(len(self._used), self._beams, self._cache.shape[3], -1).transpose(1, 2)
            for part in (query, key, value)
        )
        keys, values = self._cache[layer, ..., : self._columns, :]
        keys[..., -self._beams :, :], values[..., -self._beams :, :] = key, value
        attended = few_query_attention(query, keys, values, self._used[:, None, :, : self._columns])
        return attended.transpose(1, 2).reshape(len(self._used) * self._beams, -1)

    def reorder(self, hypotheses: Tensor) -> None:
        """See `DecoderState.reorder`."""
        self._used = self._used.flatten(0, 1).index_select(0, hypotheses).view(self._used.shape)

    def select_sentences(self, sentences: Tensor) -> None:
        """See `DecoderState.select_sentences`."""
        self._cache = select_rows_(self._cache, sentences, dim=2)
        self._used = select_rows_(self._used, sentences)

    def _make_room(self) -> None:
        """Move the columns that are used to the front, and leave at least as many free ones behind them."""
        used = self._used.any(1)
        columns = int(used.sum(1).max())
        order = used.int().argsort(dim=1, descending=True, stable=True)[:, :columns]
        room = max(self._used.shape[2], 2 * columns)
        sentences, heads, old_room, width = self._cache.shape[2:]
        first = torch.arange(sentences * heads, device=order.device).view(sentences, heads, 1) * old_room
        rows = (first + order[:, None]).flatten()
        old, new = self._cache, self._cache
        if room > old_room:
            new = old.new_empty(*old.shape[:4], room, width)
        layers = (cache.view(-1, sentences, heads, cache.shape[4], width) for cache in (old, new))
        for before, after in zip(*layers, strict=True):
            moved = before.view(-1, width).index_select(0, rows)
            after[:, :, :columns] = moved.view(sentences, heads, columns, width)
        mask = self._used.new_zeros(sentences, self._beams, room)
        mask[..., :columns] = self._used.gather(2, order[:, None].expand(-1, self._beams, -1))
        self._cache, self._used, self._columns = new, mask, columns
