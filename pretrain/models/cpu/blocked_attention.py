"""Attention block by block: with dropout on a CPU, and with relative positions.

With dropout torch would keep three score matrices and draw the masks slowly, and its fused kernels have no gradient for
what relative positions add to the scores.
"""

from typing import Any

import torch
from torch import Tensor

from multihop.pretrain.models.cpu.dropout import keep_mask, kept_share
from multihop.pretrain.models.relative_positions import collect, spread

_SCORES_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""Elements of the attention scores computed at a time: so that they stay in the processor's cache, and on a GPU so that
there are few kernels (not measured there)."""
_QUERIES_AT_ONCE = 128
"""Rows of scores at a time: under a causal mask, where the columns after them are left out, and with relative
positions, where the indices of the distances would take more memory than the scores."""


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """Scaled dot-product attention of (B, heads, T, width) whose scores are computed again in the backward pass.

    Only the mask of the dropout is kept of the size of the scores, a byte an element.

    Args:
        relative: (B, heads, T, C), the products of the queries with the embeddings of the clipped distances.
        mask: bool (B, 1, 1, T), true at the keys to attend to; None under a causal mask.
    """
    out: Tensor = _BlockedAttention.apply(query, key, value, relative, mask, causal, dropout)
    return out


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        q, k, v = (part.reshape(-1, *part.shape[2:]) for part in (query, key, value))
        products = None if relative is None else relative.reshape(-1, *relative.shape[2:])
        seen = None if mask is None else mask.expand(-1, query.shape[1], -1, -1).reshape(len(q), 1, -1)
        out = torch.empty_like(q)
        kept = []
        for rows, columns in _blocks(q, causal, relative is not None):
            weights = _weights(q, k, products, seen, rows, columns, causal)
            if dropout > 0:
                kept.append(keep_mask(weights.shape, dropout, weights.device))
                weights.mul_(kept[-1])
            out[rows] = torch.bmm(weights, v[columns])
        if dropout > 0:
            out.mul_(1 / kept_share(dropout))
        ctx.save_for_backward(q, k, v, products, seen, *kept)
        ctx.causal, ctx.dropout, ctx.shape = causal, dropout, query.shape
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, products, seen, *kept = ctx.saved_tensors
        grad_out = gradients[0].reshape(q.shape) * (1 / kept_share(ctx.dropout))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_products = None if products is None else torch.empty_like(products)
        scale = q.shape[-1] ** -0.5
        for number, (rows, columns) in enumerate(_blocks(q, ctx.causal, products is not None)):
            weights = _weights(q, k, products, seen, rows, columns, ctx.causal)
            dropped = weights * kept[number] if kept else weights
            grad_v[columns].baddbmm_(dropped.transpose(1, 2), grad_out[rows])
            grad_weights = torch.bmm(grad_out[rows], v[columns].transpose(1, 2))
            if kept:
                grad_weights.mul_(kept[number])
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_q[rows] = torch.bmm(grad_scores, k[columns]).mul_(scale)
            grad_k[columns].baddbmm_(grad_scores.transpose(1, 2), q[rows], alpha=scale)
            if grad_products is not None:
                count = grad_products.shape[-1]
                grad_products[rows] = collect(grad_scores, rows[1].start, count, ctx.causal).mul_(scale)
        by_head = (
            grad if grad is None else grad.view(*ctx.shape[:3], -1) for grad in (grad_q, grad_k, grad_v, grad_products)
        )
        return (*by_head, None, None, None)


_Block = tuple[tuple[slice, slice], tuple[slice, slice]]


def _blocks(q: Tensor, causal: bool, relative: bool) -> list[_Block]:
    """Which rows, and which columns, of the (heads, T, T) scores are computed at a time."""
    heads, length, _ = q.shape
    together = max(1, _SCORES_AT_ONCE[q.device.type] // length**2)
    queries = _QUERIES_AT_ONCE if causal or relative else length
    return [
        (
            (slice(first, first + together), slice(row, row + queries)),
            (slice(first, first + together), slice(0, row + queries if causal else length)),
        )
        for first in range(0, heads, together)
        for row in range(0, length, queries)
    ]


def _weights(
    q: Tensor,
    k: Tensor,
    products: Tensor | None,
    seen: Tensor | None,
    rows: tuple[slice, slice],
    columns: tuple[slice, slice],
    causal: bool,
) -> Tensor:
    scale, keys = q.shape[-1] ** -0.5, k[columns].transpose(1, 2)
    if products is None:
        scores = torch.bmm(q[rows], keys).mul_(scale)
    else:
        of_rows = products[rows]
        at = rows[1].start + torch.arange(of_rows.shape[1], device=q.device)
        scores = spread(of_rows, at, keys.shape[2], causal).baddbmm_(q[rows], keys, beta=scale, alpha=scale)
    if causal:
        last = scores[:, :, rows[1].start :]
        last.masked_fill_(torch.ones(last.shape[1:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    elif seen is not None:
        scores.masked_fill_(~seen[columns[0]], -torch.inf)
    return torch.softmax(scores, -1)
