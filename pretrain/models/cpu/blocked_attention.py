"""Attention block by block: with dropout on a CPU, with relative positions, and within a sliding window.

With dropout torch would keep three score matrices and draw the masks slowly, and its fused kernels have no gradient for
the terms that relative positions add to the scores. They also compute the scores that a window masks.
"""

from typing import Any

import torch
from torch import Tensor

from multihop.pretrain.device_type import device_type
from multihop.pretrain.models.cpu.dropout import keep_mask, keep_probability
from multihop.pretrain.models.relative_positions import expand_by_distance, sum_by_distance

_BLOCK_SCORES = {"cpu": 2**20, "cuda": 2**26}
"""Attention scores of a block: on a CPU few enough to stay in its cache, on a GPU enough for few kernels (not measured
there)."""
_BLOCK_QUERIES = 128
"""Queries of a block: under a causal mask, where the keys after them are left out, and with relative positions, where
the indices of the distances would take more memory than the scores."""
_WINDOW_QUERIES = 64
"""Queries of a block within a window: with more of them, more keys are within the window of some of them only."""


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
    """Scaled dot-product attention of (B, heads, T, width) whose scores are recomputed in the backward pass.

    Of the tensors as large as the scores only the dropout mask is saved, in a byte per element. Within a window,
    time and memory are linear in T.

    Args:
        relative: (B, heads, T, C), the products of the queries with the embeddings of the clipped distances.
        mask: bool (B, 1, 1, T), true at the keys to attend to; None under a causal mask.
        window: the maximum distance between a query and a key that it attends to; None: no maximum. Not with
            `relative`.
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
        key_mask = None if mask is None else mask.expand(-1, query.shape[1], -1, -1).reshape(len(q), 1, -1)
        out = torch.empty_like(q)
        dropout_masks = []
        for rows, columns in _blocks(q, causal, relative is not None, window):
            weights = _weights(q, k, products, key_mask, rows, columns, causal, window)
            if dropout > 0:
                dropout_masks.append(keep_mask(weights.shape, dropout, weights.device))
                weights.mul_(dropout_masks[-1])
            out[rows] = torch.bmm(weights, v[columns])
        if dropout > 0:
            out.mul_(1 / keep_probability(dropout))
        ctx.save_for_backward(q, k, v, products, key_mask, *dropout_masks)
        ctx.causal, ctx.dropout, ctx.window, ctx.shape = causal, dropout, window, query.shape
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, products, key_mask, *dropout_masks = ctx.saved_tensors
        grad_out = gradients[0].reshape(q.shape) * (1 / keep_probability(ctx.dropout))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_products = None if products is None else torch.empty_like(products)
        scale = q.shape[-1] ** -0.5
        for number, (rows, columns) in enumerate(_blocks(q, ctx.causal, products is not None, ctx.window)):
            weights = _weights(q, k, products, key_mask, rows, columns, ctx.causal, ctx.window)
            dropped = weights * dropout_masks[number] if dropout_masks else weights
            grad_v[columns].baddbmm_(dropped.transpose(1, 2), grad_out[rows])
            grad_weights = torch.bmm(grad_out[rows], v[columns].transpose(1, 2))
            if dropout_masks:
                grad_weights.mul_(dropout_masks[number])
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_q[rows] = torch.bmm(grad_scores, k[columns]).mul_(scale)
            grad_k[columns].baddbmm_(grad_scores.transpose(1, 2), q[rows], alpha=scale)
            if grad_products is not None:
                count = grad_products.shape[-1]
                grad_products[rows] = sum_by_distance(grad_scores, rows[1].start, count, ctx.causal).mul_(scale)
        by_head = (
            grad if grad is None else grad.view(*ctx.shape[:3], -1) for grad in (grad_q, grad_k, grad_v, grad_products)
        )
        return (*by_head, None, None, None, None)


_Block = tuple[tuple[slice, slice], tuple[slice, slice]]


def _blocks(q: Tensor, causal: bool, relative: bool, window: int | None) -> list[_Block]:
    """The rows and columns of the (heads, T, T) scores that are computed at a time."""
    heads, length, _ = q.shape
    queries, keys = _BLOCK_QUERIES if causal or relative else length, length
    scores = length**2
    if window is not None:
        queries = min(_WINDOW_QUERIES, length)
        keys = queries + (1 if causal else 2) * window
        scores = queries * min(keys, length)
    block_heads = max(1, _BLOCK_SCORES[device_type(q.device)] // scores)
    return [
        (
            (slice(first, first + block_heads), slice(row, row + queries)),
            (slice(first, first + block_heads), _keys(row, row + queries, length, causal, window)),
        )
        for first in range(0, heads, block_heads)
        for row in range(0, length, queries)
    ]


def _keys(start: int, stop: int, length: int, causal: bool, window: int | None) -> slice:
    """The keys that some query from `start` to `stop` - 1 attends to."""
    first = 0 if window is None else max(0, start - window)
    last = stop if causal else length if window is None else stop + window
    return slice(first, min(last, length))


def _weights(
    q: Tensor,
    k: Tensor,
    products: Tensor | None,
    key_mask: Tensor | None,
    rows: tuple[slice, slice],
    columns: tuple[slice, slice],
    causal: bool,
    window: int | None,
) -> Tensor:
    scale, keys = q.shape[-1] ** -0.5, k[columns].transpose(1, 2)
    if products is None:
        scores = torch.bmm(q[rows], keys).mul_(scale)
    else:
        row_products = products[rows]
        positions = rows[1].start + torch.arange(row_products.shape[1], device=q.device)
        scores = expand_by_distance(row_products, positions, keys.shape[2], causal).baddbmm_(
            q[rows], keys, beta=scale, alpha=scale
        )
    offset = rows[1].start - columns[1].start
    if causal:
        last = scores[:, :, offset:]
        last.masked_fill_(torch.ones(last.shape[1:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    elif key_mask is not None:
        # Not -inf: within a window, a query in the padding may have no other key.
        scores.masked_fill_(~key_mask[columns[0]][..., columns[1]], torch.finfo(scores.dtype).min)
    if window is not None:
        scores.masked_fill_(_is_beyond(window, scores, offset, causal), -torch.inf)
    return torch.softmax(scores, -1)


def _is_beyond(window: int, scores: Tensor, offset: int, causal: bool) -> Tensor:
    """bool (rows, columns), true where the distance of a query and a key is larger than `window`.

    Args:
        offset: the column of the first row's own key.
    """
    beyond = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril_(offset - window - 1)
    return beyond if causal else beyond | torch.ones_like(beyond).triu_(offset + window + 1)
