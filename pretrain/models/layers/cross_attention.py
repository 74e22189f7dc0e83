"""Attention from packed sequences to other packed sequences (Vaswani et al. 2017, section 3.2.3)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.device_type import device_type
from multihop.pretrain.models.config import AttentionConfig
from multihop.pretrain.models.cpu.few_queries import few_query_attention
from multihop.pretrain.models.cpu.padded_batches import PaddedBatch, PaddingIndices, padding_indices
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.varlen_attention import varlen_attention
from multihop.pretrain.uncompiled import uncompiled

_MAX_PADDING_RATIO = 1 / 8
"""The most padding that a sequence may get in its bucket, as a share of the longest sequence."""
_ALLOWED_PADDING = 4
"""Tokens of padding that a sequence may always get: one more bucket costs more than a few columns of scores."""


@dataclass(frozen=True)
class Pairs:
    """Packed sequences of queries, and as many of keys: sequence i attends to all of sequence i of the other side."""

    queries: Sequences
    keys: Sequences

    @property
    def equal_lengths(self) -> bool:
        """Whether all sequences of either side have the same length."""
        return self.queries.equal_lengths and self.keys.equal_lengths

    @cached_property
    def buckets(self) -> "list[PairBucket]":
        """Groups of pairs whose lengths are similar on both sides."""
        queries, keys = (side.cu_seqlens.diff().tolist() for side in (self.queries, self.keys))
        return [
            PairBucket(_padded_batch(self.queries, queries, pairs), _padded_batch(self.keys, keys, pairs))
            for group in _group_by_length(range(len(queries)), queries)
            for pairs in _group_by_length(group, keys)
        ]

    @cached_property
    def padding_indices(self) -> tuple[PaddingIndices, PaddingIndices]:
        """The positions of the queries and of the keys in all buckets."""
        queries, keys = ([bucket.queries for bucket in self.buckets], [bucket.keys for bucket in self.buckets])
        return padding_indices(queries, self.queries.tokens), padding_indices(keys, self.keys.tokens)


@dataclass(frozen=True)
class PairBucket:
    """B pairs; the shorter ones are padded with their last tokens."""

    queries: PaddedBatch
    """(B, Tq)."""
    keys: PaddedBatch
    """(B, Tk)."""


def _group_by_length(members: "list[int] | range", lengths: list[int]) -> list[list[int]]:
    """Groups of similar lengths, the longest first."""
    groups: list[list[int]] = []
    for member in sorted(members, key=lambda each: -lengths[each]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[member] >= min(longest * (1 - _MAX_PADDING_RATIO), longest - _ALLOWED_PADDING):
            groups[-1].append(member)
        else:
            groups.append([member])
    return groups


def _padded_batch(side: Sequences, lengths: list[int], pairs: list[int]) -> PaddedBatch:
    """Gather the chosen sequences of one side."""
    device, chosen = side.cu_seqlens.device, [lengths[pair] for pair in pairs]
    each, columns = torch.tensor(chosen, device=device)[:, None], torch.arange(max(chosen), device=device)
    starts = side.cu_seqlens[torch.tensor(pairs, device=device)][:, None]
    mask = None if min(chosen) == max(chosen) else columns < each
    return PaddedBatch(starts + torch.minimum(columns, each - 1), mask)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(B, Tq, Q), (B, Tk, K), (B, Tk, V) and a bool (B, Tk), true at the keys to attend to, or None -> (B, Tq, V)."""


@uncompiled
def apply_by_bucket(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, attend: Attend) -> Tensor:
    """Apply `attend` to padded batches of pairs of similar lengths.

    Args:
        query: (Nq, Q); key: (Nk, K); value: (Nk, V).

    Returns:
        (Nq, V).
    """
    if pairs.equal_lengths:
        sequences = len(pairs.queries.cu_seqlens) - 1
        q, k, v = (part.view(sequences, -1, part.shape[1]) for part in (query, key, value))
        return attend(q, k, v, None).reshape(len(query), -1)
    query_indices, key_indices = pairs.padding_indices
    queries, keys, values = query_indices.pad(query), key_indices.pad(key), key_indices.pad(value)
    attended = [
        attend(q, k, v, bucket.keys.mask).flatten(0, 1)
        for bucket, q, k, v in zip(pairs.buckets, queries, keys, values, strict=True)
    ]
    return query_indices.unpad(torch.cat(attended))


@uncompiled
def cross_attend(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, scale: float | None = None) -> Tensor:
    """Dot-product attention of each query to the keys of the other sequence of its pair.

    Args:
        query: (Nq, heads, width); key, value: (Nk, heads, width).
        scale: the factor of the scores; None: width**-0.5.

    Returns:
        (Nq, heads, width).
    """
    heads = query.shape[1]
    if device_type(query.device) == "cuda" and (query.is_meta or not pairs.equal_lengths):
        return varlen_attention(query, key, value, pairs.queries.bounds, pairs.keys.bounds, scale=scale)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (q, k, v))
        mask = None if mask is None else mask[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2).flatten(2)

    return apply_by_bucket(query.flatten(1), key.flatten(1), value.flatten(1), pairs, attend).view(query.shape)


@dataclass(frozen=True)
class PaddedSource:
    """Projected encoder outputs of S sources during decoding, stored once per source whatever the number of beams."""

    parts: tuple[Tensor, ...]
    """(S, …) each, padded to the longest source: the keys and values of attention."""
    mask: Tensor | None
    """bool (S, T), false at the padding; None without padding."""

    def select(self, sources: Tensor) -> Self:
        """Select sources, int64 (S',), in this order."""
        mask = None if self.mask is None else self.mask.index_select(0, sources)
        return type(self)(tuple(part.index_select(0, sources) for part in self.parts), mask)

    def select_(self, sources: Tensor) -> Self:
        """Select sources as `select` does, in the memory of this one's tensors, which it overwrites; without a
        gradient."""
        mask = None if self.mask is None else select_rows_(self.mask, sources)
        return type(self)(tuple(select_rows_(part, sources) for part in self.parts), mask)


def select_rows_(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """`x.index_select(dim, rows)` in x's memory, for at most as many rows as x has: only rows that move are copied."""
    moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().flatten()
    if len(moved):
        x.index_copy_(dim, moved, x.index_select(dim, rows[moved]))
    return x.narrow(dim, 0, len(rows))


def pad_source(parts: tuple[Tensor, ...], sequences: Sequences) -> PaddedSource:
    """Pad packed tensors, (N, ·) each, to the longest sequence."""
    lengths = sequences.cu_seqlens.diff()
    columns = torch.arange(sequences.max_seqlen, device=lengths.device)
    indices = sequences.cu_seqlens[:-1, None] + torch.minimum(columns, lengths[:, None] - 1)
    padded = tuple(part.index_select(0, indices.flatten()).view(*indices.shape, -1) for part in parts)
    return PaddedSource(padded, None if sequences.equal_lengths else columns < lengths[:, None])


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
        return self.output(cross_attend(query, key, value, pairs).flatten(1))

    def attention_map(self, x: Tensor, source: Tensor, pairs: Pairs) -> Tensor:
        """The mean over the heads of one pair's attention weights, (Nt, Ns); see
        `EncoderDecoder.last_cross_attention`."""
        query, key = (
            project(side).view(len(side), self.heads, -1).transpose(0, 1)
            for project, side in ((self.query, x), (self.key, source))
        )
        return (query @ key.transpose(1, 2) * query.shape[2] ** -0.5).softmax(-1).mean(0)

    def project_source(self, source: Tensor, sequences: Sequences) -> PaddedSource:
        """Keys and values, (S, heads, T, width) each, of the encoder's outputs (Ns, H), for `decode_step`."""
        padded = pad_source((self.key(source), self.value(source)), sequences)
        parts = (part.unflatten(2, (self.heads, -1)).transpose(1, 2).contiguous() for part in padded.parts)
        return PaddedSource(tuple(parts), padded.mask)

    def decode_step(self, x: Tensor, source: PaddedSource) -> Tensor:
        """Attend from one token of each hypothesis: x and the result are (S * beams, H)."""
        key, value = source.parts
        query = self.query(x).view(len(key), -1, self.heads, key.shape[-1]).transpose(1, 2)
        mask = None if source.mask is None else source.mask[:, None, None]
        attended = few_query_attention(query, key, value, mask)
        return self.output(attended.transpose(1, 2).reshape(x.shape))
