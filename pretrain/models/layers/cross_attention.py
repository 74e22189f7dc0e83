"""Attention from packed sequences to other packed sequences (Vaswani et al. 2017, section 3.2.3)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.config import AttentionConfig
from multihop.pretrain.models.cpu.few_queries import attend_from_few
from multihop.pretrain.models.cpu.rectangles import Rectangle, RowPositions, row_positions
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.variable_length import attend_by_lengths

_PADDED = 1 / 8
"""How much shorter than the longest sequence of its bucket a sequence may be, as a share of that one."""
_SLACK = 4
"""Tokens by which it may always be shorter: one more bucket costs more than a few columns of scores."""


@dataclass(frozen=True)
class Pairs:
    """Packed sequences of queries, and as many of keys: sequence i attends to all of sequence i of the other side."""

    queries: Sequences
    keys: Sequences

    @property
    def equal(self) -> bool:
        """Whether all sequences of either side have the same length."""
        return self.queries.equal and self.keys.equal

    @cached_property
    def buckets(self) -> "list[PairBucket]":
        """Groups of pairs whose lengths are similar on both sides."""
        queries, keys = (side.cu_seqlens.diff().tolist() for side in (self.queries, self.keys))
        return [
            PairBucket(_rectangle(self.queries, queries, pairs), _rectangle(self.keys, keys, pairs))
            for level in _grouped(range(len(queries)), queries)
            for pairs in _grouped(level, keys)
        ]

    @cached_property
    def row_positions(self) -> tuple[RowPositions, RowPositions]:
        """The positions of the queries and of the keys in all buckets."""
        queries, keys = ([bucket.queries for bucket in self.buckets], [bucket.keys for bucket in self.buckets])
        return row_positions(queries, self.queries.tokens), row_positions(keys, self.keys.tokens)


@dataclass(frozen=True)
class PairBucket:
    """B pairs; the shorter ones are padded with their last tokens."""

    queries: Rectangle
    """(B, Tq)."""
    keys: Rectangle
    """(B, Tk)."""


def _grouped(members: "list[int] | range", lengths: list[int]) -> list[list[int]]:
    """Groups of similar lengths, the longest first."""
    groups: list[list[int]] = []
    for member in sorted(members, key=lambda each: -lengths[each]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[member] >= min(longest * (1 - _PADDED), longest - _SLACK):
            groups[-1].append(member)
        else:
            groups.append([member])
    return groups


def _rectangle(side: Sequences, lengths: list[int], pairs: list[int]) -> Rectangle:
    """Gather the chosen sequences of one side."""
    device, chosen = side.cu_seqlens.device, [lengths[pair] for pair in pairs]
    each, columns = torch.tensor(chosen, device=device)[:, None], torch.arange(max(chosen), device=device)
    starts = side.cu_seqlens[torch.tensor(pairs, device=device)][:, None]
    real = None if min(chosen) == max(chosen) else columns < each
    return Rectangle(starts + torch.minimum(columns, each - 1), real)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(B, Tq, Q), (B, Tk, K), (B, Tk, V) and a bool (B, Tk), true at the keys to attend to, or None -> (B, Tq, V)."""


@torch.compiler.disable
def by_buckets(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, attend: Attend) -> Tensor:
    """`attend` applied to rectangles of pairs of similar lengths.

    Args:
        query: (Nq, Q); key: (Nk, K); value: (Nk, V).

    Returns:
        (Nq, V).
    """
    if pairs.equal:
        sequences = len(pairs.queries.cu_seqlens) - 1
        q, k, v = (part.view(sequences, -1, part.shape[1]) for part in (query, key, value))
        return attend(q, k, v, None).reshape(len(query), -1)
    of_queries, of_keys = pairs.row_positions
    queries, keys, values = of_queries.spread(query), of_keys.spread(key), of_keys.spread(value)
    done = [
        attend(q, k, v, bucket.keys.real).flatten(0, 1)
        for bucket, q, k, v in zip(pairs.buckets, queries, keys, values, strict=True)
    ]
    return of_queries.gather(torch.cat(done))


@torch.compiler.disable
def attend_across(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, scale: float | None = None) -> Tensor:
    """Dot-product attention of each token of the queries to the tokens of its sequence of keys.

    Args:
        query: (Nq, heads, width); key, value: (Nk, heads, width).
        scale: of the scores; None: width**-0.5.

    Returns:
        (Nq, heads, width).
    """
    heads = query.shape[1]
    if query.device.type == "cuda" and not pairs.equal:
        return attend_by_lengths(query, key, value, pairs.queries.bounds, pairs.keys.bounds, scale=scale)

    def attend(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (q, k, v))
        mask = None if real is None else real[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2).flatten(2)

    return by_buckets(query.flatten(1), key.flatten(1), value.flatten(1), pairs, attend).view(query.shape)


@dataclass(frozen=True)
class PaddedSource:
    """The tensors of S sources while targets grow, stored once per source whatever the number of its hypotheses."""

    parts: tuple[Tensor, ...]
    """(S, …) each, padded to the longest source: keys and values of cross-attention, for instance."""
    real: Tensor | None
    """bool (S, T), false at the padding; None without padding."""

    def select(self, sources: Tensor) -> Self:
        """The chosen sources, int64 (S',), in this order."""
        real = None if self.real is None else self.real.index_select(0, sources)
        return type(self)(tuple(part.index_select(0, sources) for part in self.parts), real)

    def keep(self, sources: Tensor) -> Self:
        """Overwrite this one in place with the same tensors without a gradient."""
        real = None if self.real is None else keep_rows(self.real, sources)
        return type(self)(tuple(keep_rows(part, sources) for part in self.parts), real)


def keep_rows(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """`x.index_select(dim, rows)`, no more rows than x has, in x's memory: only rows that move are copied."""
    moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().flatten()
    if len(moved):
        x.index_copy_(dim, moved, x.index_select(dim, rows[moved]))
    return x.narrow(dim, 0, len(rows))


def pad_source(parts: tuple[Tensor, ...], sequences: Sequences) -> PaddedSource:
    """Packed rows, (N, ·) each, as rectangles."""
    lengths = sequences.cu_seqlens.diff()
    columns = torch.arange(sequences.max_seqlen, device=lengths.device)
    at = sequences.cu_seqlens[:-1, None] + torch.minimum(columns, lengths[:, None] - 1)
    rows = tuple(part.index_select(0, at.flatten()).view(*at.shape, -1) for part in parts)
    return PaddedSource(rows, None if sequences.equal else columns < lengths[:, None])


class CrossAttention(nn.Module):
    """Multi-head attention of a decoder to the encoder's states (Vaswani et al. 2017, section 3.2.3)."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, source: Tensor, pairs: Pairs) -> Tensor:
        """x and the result: (Nt, H); source: (Ns, H)."""
        query, key, value = (
            project(side).view(len(side), self.heads, -1)
            for project, side in ((self.query, x), (self.key, source), (self.value, source))
        )
        return self.output(attend_across(query, key, value, pairs).flatten(1))

    def map_of(self, x: Tensor, source: Tensor, pairs: Pairs) -> Tensor:
        """The mean over the heads of the attention weights of one pair: (Nt, Ns); see `EncoderDecoder.attends_by`."""
        query, key = (
            project(side).view(len(side), self.heads, -1).transpose(0, 1)
            for project, side in ((self.query, x), (self.key, source))
        )
        return (query @ key.transpose(1, 2) * query.shape[2] ** -0.5).softmax(-1).mean(0)

    def keep(self, source: Tensor, sequences: Sequences) -> PaddedSource:
        """Keys and values of the encoder's states (Ns, H), for `advance`: (S, heads, T, width) each."""
        padded = pad_source((self.key(source), self.value(source)), sequences)
        parts = (part.unflatten(2, (self.heads, -1)).transpose(1, 2).contiguous() for part in padded.parts)
        return PaddedSource(tuple(parts), padded.real)

    def advance(self, x: Tensor, source: PaddedSource) -> Tensor:
        """One token of each hypothesis: x and the result (S * beams, H). The beams of a source are rows of queries."""
        key, value = source.parts
        query = self.query(x).view(len(key), -1, self.heads, key.shape[-1]).transpose(1, 2)
        mask = None if source.real is None else source.real[:, None, None]
        attended = attend_from_few(query, key, value, mask)
        return self.output(attended.transpose(1, 2).reshape(x.shape))
