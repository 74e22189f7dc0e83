"""XLNet's layers: two-stream attention with relative positions and segments (Yang et al. 2019, sections 2.3 to 2.5).

Packed sequences are attended to as padded batches of similar lengths, because no fused kernel has the terms of the
scores that depend on two positions. Memory grows with the square of a sequence's length, not with that of the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.cpu.padded_batches import PaddedBatch, PaddingIndices, padding_indices
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import select_tokens
from multihop.pretrain.models.layers.cached_tables import cached_table
from multihop.pretrain.models.xlnet.config import XlnetConfig
from multihop.pretrain.packed_tokens import PackedTokens
from multihop.pretrain.uncompiled import uncompiled

EPS = 1e-12
_MEMORY = -2
"""The place of memories in the factorization order, before the tokens at -1, which all tokens but memories see."""


@dataclass(frozen=True)
class QueryBatch:
    """Q queries of each of B sequences of up to T tokens, padded, and the keys that they attend to."""

    positions: Tensor | None
    """int64 (B, Q), each query's position in its sequence; None: the queries are the keys, at 0 to T - 1."""
    visible: Tensor | None
    """bool (B, 1, Q or 1, T), true at the keys to attend to; None: all."""
    other_segment: Tensor | None
    """bool (B, 1, Q, T), true at the keys of another segment than the query's; None: all are of the same."""


@dataclass(frozen=True)
class Stream:
    """The queries of a stream in padded batches, one for each batch of keys."""

    padding: PaddingIndices
    batches: list[QueryBatch]


@dataclass(frozen=True)
class Layout:
    """How the streams of packed sequences attend, the same in each layer."""

    content: Stream
    """All N tokens; they are the keys and values of both streams."""
    query: Stream | None
    """The M tokens of the query stream; None: there is none."""
    longest: int
    """The length of the longest sequence."""


def layout_of(
    packed: PackedTokens[Tensor],
    order: Tensor | None = None,
    predicted: Tensor | None = None,
    is_memory: Tensor | None = None,
) -> Layout:
    """The layout of packed sequences.

    Args:
        order: int64 (N,), each token's place in the factorization order of its sequence, -1 for those that all tokens
            see; None: all tokens see all.
        predicted: int64 (M,), M > 0, the tokens of the query stream; None: there is none.
        is_memory: bool (N,), true at tokens that all tokens see, and that see those alone at which it is true; None:
            there are none.
    """
    if is_memory is not None:
        assert order is not None
        order = order.masked_fill(is_memory, _MEMORY)
    sequences = Sequences.of(packed)
    keys = [
        PaddedBatch(bucket.indices, None if bucket.mask is None else bucket.mask[:, 0, 0])
        for bucket in sequences.buckets
    ]
    types = packed.token_type_ids
    content = Stream(
        padding_indices(keys, sequences.tokens),
        [
            QueryBatch(None, _visible(key, key.indices, order, sees_itself=True), _other(key, key.indices, types))
            for key in keys
        ],
    )
    if predicted is None:
        return Layout(content, None, sequences.max_seqlen)
    rows = [_queries_of(key, sequences.cu_seqlens, predicted) for key in keys]
    batches = []
    for key, row in zip(keys, rows, strict=True):
        tokens = predicted[row.indices]
        # Padding may be a token of another sequence.
        positions = (tokens - key.indices[:, :1]).clamp(0, key.indices.shape[1] - 1)
        visible = _visible(key, tokens, order, sees_itself=False)
        batches.append(QueryBatch(positions, visible, _other(key, tokens, types)))
    return Layout(content, Stream(padding_indices(rows, len(predicted)), batches), sequences.max_seqlen)


def _queries_of(keys: PaddedBatch, cu_seqlens: Tensor, predicted: Tensor) -> PaddedBatch:
    """The rows of `predicted` that are in the sequences of a batch of keys: (B, Q), Q > 0."""
    sequence = torch.searchsorted(cu_seqlens, predicted, right=True) - 1
    by_sequence = sequence.argsort(stable=True)
    counts = torch.bincount(sequence, minlength=len(cu_seqlens) - 1)
    own = torch.searchsorted(cu_seqlens, keys.indices[:, 0].contiguous(), right=True) - 1
    count, first = counts[own, None], (counts.cumsum(0) - counts)[own, None]
    columns = torch.arange(max(1, int(count.max())), device=predicted.device)
    rows = (first + torch.minimum(columns, (count - 1).clamp(min=0))).clamp(max=len(predicted) - 1)
    return PaddedBatch(by_sequence[rows], columns < count)


def _visible(keys: PaddedBatch, queries: Tensor, order: Tensor | None, sees_itself: bool) -> Tensor | None:
    """bool (B, 1, Q or 1, T): the keys that the tokens `queries`, int64 (B, Q), attend to (section 2.3)."""
    real = None if keys.mask is None else keys.mask[:, None, None]
    if order is None:
        assert sees_itself
        return real
    of_key, of_query = order[keys.indices][:, None], order[queries][:, :, None]
    is_itself = keys.indices[:, None] == queries[:, :, None]
    before = of_key < torch.where(of_query < 0, of_query + 1, of_query)  # equal negative places see each other
    visible = (before | is_itself if sees_itself else before & ~is_itself)[:, None]
    return visible if real is None else visible & real


def _other(keys: PaddedBatch, queries: Tensor, token_type_ids: Tensor | None) -> Tensor | None:
    if token_type_ids is None:
        return None
    return (token_type_ids[keys.indices][:, None] != token_type_ids[queries][:, :, None])[:, None]


@cached_table
def distance_encodings(longest: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(2 * longest - 1, width): sines, then cosines, of a query's distance from a key, longest - 1 to 1 - longest (Dai
    et al. 2019, section 3.3). They are computed in fp32, as in the published code."""
    frequencies = 1 / torch.pow(10000, torch.arange(0, width, 2).float() / width)
    angles = torch.arange(longest - 1, -longest, -1).float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1).to(device, dtype)


class TwoStreamAttention(nn.Module):
    """The attention of both streams, with the same weights (section 2.3).

    A query q at position i has the score (q + u) k + (q + v) r + (q + w) s for a key at position j: k is the key's
    content, r encodes the distance i - j, and s whether both are in one segment (section 2.5; Dai et al. 2019, section
    3.3).
    """

    def __init__(self, config: XlnetConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads, self.width = config.heads, hidden // config.heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.position = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(hidden))
        self.position_bias = nn.Parameter(torch.zeros(hidden))
        self.segment_bias = nn.Parameter(torch.zeros(hidden))
        self.segment = nn.Embedding(2, hidden)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        content: Tensor,
        query: Tensor | None,
        layout: Layout,
        encodings: Tensor,
        token_indices: Tensor | None = None,
        keep_content: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the tokens of each stream attend to: (N, H) or (K, H), and (M, H).

        Args:
            content: (N, H); query: (M, H), or None.
            encodings: (2 * longest - 1, H), of `distance_encodings`.
            token_indices: int64 (K,), the tokens of the content stream to return; None: all.
            keep_content: whether to return the content stream at all.
        """
        distances = self._by_head(self.position(encodings)[None])[0]
        # Scores by segment are relative to those of the same segment, which would add the same to all keys of a query.
        same, other = self.segment(torch.arange(2, device=content.device))
        of_content, of_query = self._attend(
            self.query(content) if keep_content else None,
            None if query is None else self.query(query),
            self.key(content),
            self.value(content),
            layout,
            distances,
            other - same,
        )
        if of_content is not None:
            of_content = self.output(select_tokens(of_content, token_indices))
        return of_content, None if of_query is None else self.output(of_query)

    @uncompiled
    def _attend(
        self,
        content: Tensor | None,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        distances: Tensor,
        segment: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The attention of the queries of both streams, (N, H) and (M, H), to keys and values (N, H).

        Args:
            distances: (heads, 2 * longest - 1, width).
            segment: (H,), what a key of another segment adds to one of the same.
        """
        keys, values = layout.content.padding.pad(key), layout.content.padding.pad(value)

        def attend(x: Tensor, stream: Stream) -> Tensor:
            padded = zip(stream.padding.pad(x), keys, values, stream.batches, strict=True)
            return stream.padding.unpad(torch.cat([self._attend_batch(*each, distances, segment) for each in padded]))

        assert query is None or layout.query is not None
        return (
            None if content is None else attend(content, layout.content),
            None if query is None or layout.query is None else attend(query, layout.query),
        )

    def _attend_batch(
        self, query: Tensor, key: Tensor, value: Tensor, batch: QueryBatch, distances: Tensor, segment: Tensor
    ) -> Tensor:
        """(B * Q, H), the attention of queries (B, Q, H) to keys and values (B, T, H); see `_attend`."""
        length = key.shape[1]
        query, longest = query * self.width**-0.5, (distances.shape[1] + 1) // 2
        biases = [bias * self.width**-0.5 for bias in (self.content_bias, self.position_bias, self.segment_bias)]
        by_content, by_position, by_segment = (self._by_head(query + bias) for bias in biases)
        near = distances[:, longest - length : longest + length - 1]
        scores = by_content @ self._by_head(key).transpose(2, 3)
        scores = scores + _at_keys(by_position @ near.transpose(1, 2), batch.positions)
        if batch.other_segment is not None:
            difference = (by_segment * segment.view(self.heads, 1, -1)).sum(-1, keepdim=True)
            scores = scores + difference * batch.other_segment
        if batch.visible is not None:
            # Not -inf: a query that sees no key, such as padding, would get NaN.
            scores = scores.masked_fill(~batch.visible, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, -1)
        if batch.positions is not None and batch.visible is not None:
            weights = weights.masked_fill(~batch.visible, 0.0)  # instead of seeing all keys, its own among them
        # Not a call of the module: ZeRO-3 needs the same calls on all ranks, and these have other numbers of batches.
        attended = self.dropout.forward(weights) @ self._by_head(value)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, T, H) -> (B, heads, T, width)."""
        return x.view(*x.shape[:2], self.heads, self.width).transpose(1, 2)


def _at_keys(products: Tensor, positions: Tensor | None) -> Tensor:
    """Of the products of queries with all distances, (B, heads, Q, 2T - 1), those with the distances from the keys at
    0 to T - 1: (B, heads, Q, T).

    Args:
        positions: int64 (B, Q), of the queries; None: 0 to T - 1.
    """
    length = (products.shape[-1] + 1) // 2
    if positions is not None:
        columns = length - 1 - positions[:, None, :, None] + torch.arange(length, device=products.device)
        return products.gather(-1, columns.expand(-1, products.shape[1], -1, -1))
    if length == 1:
        return products
    # Each row begins one column before the row above it: in the flat matrix, rows of 2T - 2 elements.
    flat = products.flatten(-2)[..., length - 1 :][..., : length * (2 * length - 2)]
    return flat.unflatten(-1, (length, 2 * length - 2))[..., :length]


class FeedForward(nn.Module):
    """Two projections with a GELU between them, and dropout after each."""

    def __init__(self, config: XlnetConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.hidden)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (N, H)."""
        return self.dropout(self.down(self.dropout(F.gelu(self.up(x)))))


class XlnetLayer(nn.Module):
    """A post-norm block, applied to both streams."""

    def __init__(self, config: XlnetConfig) -> None:
        super().__init__()
        self.attention = TwoStreamAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        content: Tensor,
        query: Tensor | None,
        layout: Layout,
        encodings: Tensor,
        token_indices: Tensor | None = None,
        keep_content: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The next states of both streams; arguments as of `TwoStreamAttention.forward`."""
        of_content, of_query = self.attention(content, query, layout, encodings, token_indices, keep_content)
        next_content = None if of_content is None else self._next(select_tokens(content, token_indices), of_content)
        return next_content, None if query is None or of_query is None else self._next(query, of_query)

    def _next(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(attended))
        normed: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
        return normed
