"""Attention within sequences of any lengths that stand one behind the other (Vaswani et al. 2017, section 3.2.1)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pretrain.models.dropout import keep_mask, kept_share

_SCORES_AT_ONCE = 2**20
"""Elements of a matrix of scores that are worked on together, so that they stay in the processor's cache."""
_QUERIES_AT_ONCE = 128
"""Rows of it under a causal mask, where the columns behind them are left out."""
_PADDED = 1 / 8
"""How much shorter than the longest of its bucket a sequence may be."""


@dataclass(frozen=True)
class Sequences:
    """Where sequences lie in a flat (N,) run of pieces; no piece stands between them."""

    bounds: Tensor
    """int64 (S + 1,): where each begins, and N."""
    longest: int
    """The most pieces of one of them."""
    pieces: int
    """N."""

    @property
    def starts(self) -> Tensor:
        """int64 (S,)."""
        return self.bounds[:-1]

    @property
    def equal(self) -> bool:
        """Whether all are of one length."""
        return self.pieces == (len(self.bounds) - 1) * self.longest

    @cached_property
    def buckets(self) -> "list[_Bucket]":
        """Sequences of about one length together: what a device without kernels for many lengths works through."""
        starts = self.bounds[:-1].tolist()
        lengths = self.bounds.diff().tolist()
        order = sorted(range(len(starts)), key=lambda sequence: -lengths[sequence])
        groups: list[list[int]] = []
        for sequence in order:
            longest = lengths[groups[-1][0]] if groups else 0
            if groups and lengths[sequence] >= longest * (1 - _PADDED):
                groups[-1].append(sequence)
            else:
                groups.append([sequence])
        return [
            _bucket([starts[i] for i in group], [lengths[i] for i in group]) for group in groups if lengths[group[0]]
        ]

    @cached_property
    def order(self) -> Tensor:
        """int64 (N,): where each piece stands when the buckets' rows are joined, padding included."""
        order = torch.empty(self.pieces, dtype=torch.int64)
        before = 0
        for bucket in self.buckets:
            length = bucket.at.shape[1]
            places = before + torch.arange(bucket.at.numel()).view_as(bucket.at)
            real = torch.arange(length) < bucket.lengths[:, None]
            order[bucket.at[real]] = places[real]
            before += bucket.at.numel()
        return order


@dataclass(frozen=True)
class _Bucket:
    at: Tensor
    """int64 (B, T): the pieces of B sequences; behind the end of a shorter one stands its last piece again."""
    lengths: Tensor
    """int64 (B,)."""
    real: Tensor | None
    """bool (B, 1, 1, T), false at the padding; None where there is none."""


def _bucket(starts: list[int], lengths: list[int]) -> _Bucket:
    each, columns = torch.tensor(lengths), torch.arange(lengths[0])
    at = torch.tensor(starts)[:, None] + torch.minimum(columns, each[:, None] - 1)
    padded = lengths[-1] < lengths[0]
    return _Bucket(at, each, (columns < each[:, None])[:, None, None, :] if padded else None)


@torch.compiler.disable
def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, causal: bool, dropout: float) -> Tensor:
    """What each piece takes from the pieces of its sequence.

    Args:
        query, key, value: (N, heads, width).
        causal: a piece sees those before it and itself.
        dropout: of the attention's weights.

    Returns:
        (N, heads, width).
    """
    if query.device.type == "cuda" and not sequences.equal:
        return _with_kernels_for_lengths(query, key, value, sequences, causal, dropout)
    own = dropout > 0 and query.device.type == "cpu"
    if sequences.equal:
        shape = (len(sequences.bounds) - 1, sequences.longest, *query.shape[1:])
        q, k, v = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        return _dense(q, k, v, None, causal, dropout, own).transpose(1, 2).reshape(query.shape)
    flat = [part.reshape(len(part), -1) for part in (query, key, value)]
    done = []
    for bucket in sequences.buckets:
        shape = (*bucket.at.shape, *query.shape[1:])
        q, k, v = (part.index_select(0, bucket.at.flatten()).view(shape).transpose(1, 2) for part in flat)
        # Under a causal mask no piece sees the padding, which comes after it.
        mask = None if causal else bucket.real
        done.append(_dense(q, k, v, mask, causal, dropout, own).transpose(1, 2).reshape(-1, flat[0].shape[1]))
    return torch.cat(done).index_select(0, sequences.order).view(query.shape)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, own: bool
) -> Tensor:
    """Attention of (B, heads, T, width); mask: bool (B, 1, 1, T), true at the keys that are seen."""
    if own:
        out: Tensor = _BlockedAttention.apply(query, key, value, mask, causal, dropout)
        return out
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)


def _with_kernels_for_lengths(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, causal: bool, dropout: float
) -> Tensor:
    """FlashAttention's kernels for sequences of many lengths (Dao 2023), which torch has behind jagged tensors."""
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(part, sequences.bounds, max_seqlen=sequences.longest).transpose(1, 2)
        for part in (query, key, value)
    )
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    return out.transpose(1, 2).values()


class _BlockedAttention(torch.autograd.Function):
    """Attention with dropout on a CPU, where torch would keep three matrices of scores and draw their masks slowly.

    The scores are computed block by block, and again in the backward pass; of each only the mask is kept, a byte.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
    ) -> Tensor:
        q, k, v = (part.reshape(-1, *part.shape[2:]) for part in (query, key, value))
        seen = None if mask is None else mask.expand(-1, query.shape[1], -1, -1).reshape(len(q), 1, -1)
        out = torch.empty_like(q)
        kept = []
        for rows, columns in _blocks(q, causal):
            weights = _weights(q, k, seen, rows, columns, causal)
            kept.append(keep_mask(weights.shape, dropout))
            out[rows] = torch.bmm(weights.mul_(kept[-1]), v[columns])
        out.mul_(1 / kept_share(dropout))
        ctx.save_for_backward(q, k, v, *([seen] if seen is not None else []), *kept)
        ctx.masked, ctx.causal, ctx.dropout, ctx.shape = seen is not None, causal, dropout, query.shape
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        seen = kept.pop(0) if ctx.masked else None
        of_out = gradients[0].reshape(q.shape) * (1 / kept_share(ctx.dropout))
        of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        scale = q.shape[-1] ** -0.5
        for (rows, columns), mask in zip(_blocks(q, ctx.causal), kept, strict=True):
            weights = _weights(q, k, seen, rows, columns, ctx.causal)
            of_v[columns].baddbmm_((weights * mask).transpose(1, 2), of_out[rows])
            of_weights = torch.bmm(of_out[rows], v[columns].transpose(1, 2)).mul_(mask)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            of_q[rows] = torch.bmm(of_scores, k[columns]).mul_(scale)
            of_k[columns].baddbmm_(of_scores.transpose(1, 2), q[rows], alpha=scale)
        return of_q.view(ctx.shape), of_k.view(ctx.shape), of_v.view(ctx.shape), None, None, None


_Block = tuple[tuple[slice, slice], tuple[slice, slice]]


def _blocks(q: Tensor, causal: bool) -> list[_Block]:
    """Which rows, and which columns, of the (heads, T, T) scores are computed together."""
    heads, length, _ = q.shape
    together = max(1, _SCORES_AT_ONCE // length**2)
    queries = _QUERIES_AT_ONCE if causal else length
    return [
        (
            (slice(first, first + together), slice(row, row + queries)),
            (slice(first, first + together), slice(0, row + queries if causal else length)),
        )
        for first in range(0, heads, together)
        for row in range(0, length, queries)
    ]


def _weights(
    q: Tensor, k: Tensor, seen: Tensor | None, rows: tuple[slice, slice], columns: tuple[slice, slice], causal: bool
) -> Tensor:
    scores = torch.bmm(q[rows], k[columns].transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
    if causal:
        last = scores[:, :, rows[1].start :]
        last.masked_fill_(torch.ones(last.shape[1:], dtype=torch.bool).triu_(1), -torch.inf)
    elif seen is not None:
        scores.masked_fill_(~seen[columns[0]], -torch.inf)
    return torch.softmax(scores, -1)
