"""Attention block by block: with dropout on a CPU, with relative positions, and within a sliding window.

With dropout torch would keep three score matrices and draw the masks slowly, and its fused kernels have no gradient for
what relative positions add to the scores. They compute the whole score matrix, too, where a window masks most of it.
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
_WINDOW_QUERIES = 64
"""Rows of scores at a time within a window: more rows have more columns that only some of them attend to."""


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    window: int | None = None,
) -> Tensor:
    """Scaled dot-product attention of (B, heads, T, width) whose scores are computed again in the backward pass.

    Only the mask of the dropout is kept of the size of the scores, a byte an element. Within a window, time and memory
    are linear in T.

    Args:
        relative: (B, heads, T, C), the products of the queries with the embeddings of the clipped distances.
        mask: bool (B, 1, 1, T), true at the keys to attend to; None under a causal mask.
        window: the largest distance, in tokens, of a key that a query attends to; None: any. Not with `relative`.
    """
    assert relative is None or window is None, "no family has relative positions and a window"
    out: Tensor = _BlockedAttention.apply(query, key, value, relative, mask, causal, dropout, window)
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
        window: int | None,
    ) -> Tensor:
        q, k, v = (part.reshape(-1, *part.shape[2:]) for part in (query, key, value))
        products = None if relative is None else relative.reshape(-1, *relative.shape[2:])
        seen = None if mask is None else mask.expand(-1, query.shape[1], -1, -1).reshape(len(q), 1, -1)
        out = torch.empty_like(q)
        kept = []
        for rows, columns in _blocks(q, causal, relative is not None, window):
            weights = _weights(q, k, products, seen, rows, columns, causal, window)
            if dropout > 0:
                kept.append(keep_mask(weights.shape, dropout, weights.device))
                weights.mul_(kept[-1])
            out[rows] = torch.bmm(weights, v[columns])
        if dropout > 0:
            out.mul_(1 / kept_share(dropout))
        ctx.save_for_backward(q, k, v, products, seen, *kept)
        ctx.causal, ctx.dropout, ctx.window, ctx.shape = causal, dropout, window, query.shape
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, products, seen, *kept = ctx.saved_tensors
        grad_out = gradients[0].reshape(q.shape) * (1 / kept_share(ctx.dropout))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_products = None if products is None else torch.empty_like(products)
        scale = q.shape[-1] ** -0.5
        for number, (rows, columns) in enumerate(_blocks(q, ctx.causal, products is not None, ctx.window)):
            weights = _weights(q, k, products, seen, rows, columns, ctx.causal, ctx.window)
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
        return (*by_head, None, None, None, None)


_Block = tuple[tuple[slice, slice], tuple[slice, slice]]


def _blocks(q: Tensor, causal: bool, relative: bool, window: int | None) -> list[_Block]:
    """Which rows, and which columns, of the (heads, T, T) scores are computed at a time."""
    heads, length, _ = q.shape
    queries = length if window is None else _WINDOW_QUERIES
    if causal or relative:
        queries = min(queries, _QUERIES_AT_ONCE)
    widest = length if window is None else min(length, queries + (1 if causal else 2) * window)
    rows_at_once = length if window is None else queries
    together = max(1, _SCORES_AT_ONCE[q.device.type] // (rows_at_once * widest))
    return [
        (
            (slice(first, first + together), slice(row, row + queries)),
            (slice(first, first + together), _columns(row, row + queries, length, causal, window)),
        )
        for first in range(0, heads, together)
        for row in range(0, length, queries)
    ]


def _columns(start: int, stop: int, length: int, causal: bool, window: int | None) -> slice:
    """The keys that any of the queries from `start` to before `stop` attends to."""
    first = 0 if window is None else max(0, start - window)
    last = stop if causal else length if window is None else stop + window
    return slice(first, min(last, length))


def _weights(
    q: Tensor,
    k: Tensor,
    products: Tensor | None,
    seen: Tensor | None,
    rows: tuple[slice, slice],
    columns: tuple[slice, slice],
    causal: bool,
    window: int | None,
) -> Tensor:
    scale, keys = q.shape[-1] ** -0.5, k[columns].transpose(1, 2)
    if products is None:
        scores = torch.bmm(q[rows], keys).mul_(scale)
    else:
        of_rows = products[rows]
        at = rows[1].start + torch.arange(of_rows.shape[1], device=q.device)
        scores = spread(of_rows, at, keys.shape[2], causal).baddbmm_(q[rows], keys, beta=scale, alpha=scale)
    if causal:
        last = scores[:, :, rows[1].start - columns[1].start :]
        last.masked_fill_(torch.ones(last.shape[1:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    elif seen is not None:
        # Not -inf: a query in the padding may be farther than the window from all that is real.
        scores.masked_fill_(~seen[columns[0]][..., columns[1]], torch.finfo(scores.dtype).min)
    if window is not None:
        scores.masked_fill_(_outside(scores, rows[1].start - columns[1].start, causal, window), -torch.inf)
    return torch.softmax(scores, -1)


def _outside(scores: Tensor, offset: int, causal: bool, window: int) -> Tensor:
    """bool (rows, columns), true where a key is farther from a query than `window`.

    Args:
        offset: column of the first query's own key.
    """
    outside = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril_(offset - window - 1)
    if not causal:
        outside |= torch.ones_like(outside).triu_(offset + window + 1)
    return outside
