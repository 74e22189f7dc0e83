"""Attention within packed sequences of any lengths (Vaswani et al. 2017, section 3.2.1)."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pretrain.models.common.dropout import keep_mask, kept_share
from pretrain.models.common.key_value_cache import KeyValueCache

_SCORES_AT_ONCE = 2**20
"""Elements of the attention scores computed at a time, so that they stay in the processor's cache."""
_QUERIES_AT_ONCE = 128
"""Rows of scores at a time under a causal mask, where the columns after them are left out."""
_PADDED = 1 / 8
"""How much shorter than the longest sequence of its bucket a sequence may be."""


@dataclass(frozen=True)
class Sequences:
    """Packed sequences: where each lies in a flat tensor of N tokens."""

    cu_seqlens: Tensor
    """int64 (S + 1,): cumulative sequence lengths, from 0 to N."""
    max_seqlen: int
    """The length of the longest sequence."""
    tokens: int
    """N."""
    cache: KeyValueCache | None = None
    """Where a text is generated: of the tokens before these."""

    @property
    def equal(self) -> bool:
        """Whether all sequences have the same length."""
        return self.tokens == (len(self.cu_seqlens) - 1) * self.max_seqlen

    @cached_property
    def buckets(self) -> "list[_Bucket]":
        """Groups of sequences of similar length, for devices without variable-length kernels."""
        starts = self.cu_seqlens[:-1].tolist()
        lengths = self.cu_seqlens.diff().tolist()
        order = sorted(range(len(starts)), key=lambda sequence: -lengths[sequence])
        groups: list[list[int]] = []
        for sequence in order:
            max_seqlen = lengths[groups[-1][0]] if groups else 0
            if groups and lengths[sequence] >= max_seqlen * (1 - _PADDED):
                groups[-1].append(sequence)
            else:
                groups.append([sequence])
        return [
            _bucket([starts[i] for i in group], [lengths[i] for i in group]) for group in groups if lengths[group[0]]
        ]

    @cached_property
    def order(self) -> Tensor:
        """int64 (N,): the position of each token in the concatenated rows of all buckets, padding included."""
        order = torch.empty(self.tokens, dtype=torch.int64)
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
    """int64 (B, T): the tokens of B sequences; a shorter one is padded with its last token."""
    lengths: Tensor
    """int64 (B,)."""
    real: Tensor | None
    """bool (B, 1, 1, T), false at the padding; None without padding."""


def _bucket(starts: list[int], lengths: list[int]) -> _Bucket:
    each, columns = torch.tensor(lengths), torch.arange(lengths[0])
    at = torch.tensor(starts)[:, None] + torch.minimum(columns, each[:, None] - 1)
    padded = lengths[-1] < lengths[0]
    return _Bucket(at, each, (columns < each[:, None])[:, None, None, :] if padded else None)


@torch.compiler.disable
def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, causal: bool, dropout: float) -> Tensor:
    """Scaled dot-product attention of each token to the tokens of its sequence.

    Args:
        query, key, value: (N, heads, width).
        causal: a token attends to itself and those before it only.
        dropout: rate, of the attention weights.

    Returns:
        (N, heads, width).
    """
    if sequences.cache is not None:
        sequences.cache.append(key, value)
        if sequences.cache.is_decoding:
            return sequences.cache.attend(query)
    if query.device.type == "cuda" and not sequences.equal:
        return _variable_length(query, key, value, sequences, causal, dropout)
    blocked = dropout > 0 and query.device.type == "cpu"
    if sequences.equal:
        shape = (len(sequences.cu_seqlens) - 1, sequences.max_seqlen, *query.shape[1:])
        q, k, v = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        return _dense(q, k, v, None, causal, dropout, blocked).transpose(1, 2).reshape(query.shape)
    flat = [part.reshape(len(part), -1) for part in (query, key, value)]
    done = []
    for bucket in sequences.buckets:
        shape = (*bucket.at.shape, *query.shape[1:])
        q, k, v = (part.index_select(0, bucket.at.flatten()).view(shape).transpose(1, 2) for part in flat)
        # Under a causal mask no token attends to the padding, which comes after it.
        mask = None if causal else bucket.real
        done.append(_dense(q, k, v, mask, causal, dropout, blocked).transpose(1, 2).reshape(-1, flat[0].shape[1]))
    return torch.cat(done).index_select(0, sequences.order).view(query.shape)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, blocked: bool
) -> Tensor:
    """Attention of (B, heads, T, width); mask: bool (B, 1, 1, T), true at the keys to attend to."""
    if blocked:
        out: Tensor = _BlockedAttention.apply(query, key, value, mask, causal, dropout)
        return out
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, causal: bool, dropout: float
) -> Tensor:
    """FlashAttention's variable-length kernels (Dao 2023), which torch reaches through jagged tensors."""
    # torch wants to know that no sequence is empty, and would read the smallest length from the device in each call.
    jagged = partial(
        torch.nested.nested_tensor_from_jagged,
        offsets=sequences.cu_seqlens,
        min_seqlen=1,
        max_seqlen=sequences.max_seqlen,
    )
    q, k, v = (jagged(part).transpose(1, 2) for part in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    return out.transpose(1, 2).values()


class _BlockedAttention(torch.autograd.Function):
    """Attention with dropout on a CPU, where torch would keep three score matrices and draw the masks slowly.

    Scores are computed block by block, and again in the backward pass; only the mask is kept, a byte an element.
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
        grad_out = gradients[0].reshape(q.shape) * (1 / kept_share(ctx.dropout))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        scale = q.shape[-1] ** -0.5
        for (rows, columns), mask in zip(_blocks(q, ctx.causal), kept, strict=True):
            weights = _weights(q, k, seen, rows, columns, ctx.causal)
            grad_v[columns].baddbmm_((weights * mask).transpose(1, 2), grad_out[rows])
            grad_weights = torch.bmm(grad_out[rows], v[columns].transpose(1, 2)).mul_(mask)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_q[rows] = torch.bmm(grad_scores, k[columns]).mul_(scale)
            grad_k[columns].baddbmm_(grad_scores.transpose(1, 2), q[rows], alpha=scale)
        return grad_q.view(ctx.shape), grad_k.view(ctx.shape), grad_v.view(ctx.shape), None, None, None


_Block = tuple[tuple[slice, slice], tuple[slice, slice]]


def _blocks(q: Tensor, causal: bool) -> list[_Block]:
    """Which rows, and which columns, of the (heads, T, T) scores are computed at a time."""
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
