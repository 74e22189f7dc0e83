"""Attention block by block: with dropout on a CPU, and with relative positions.

With dropout torch would keep three score matrices and draw the masks slowly, and its fused kernels have no gradient for
the terms that relative positions add to the scores.
"""

from typing import Any

import torch
from torch import Tensor

from multihop.pretrain.models.cpu.dropout import keep_mask, keep_probability
from multihop.pretrain.models.relative_positions import expand_by_distance, sum_by_distance

_BLOCK_SCORES = {"cpu": 2**20, "cuda": 2**26}
"""Attention scores of a block: on a CPU few enough to stay in its cache, on a GPU enough for few kernels (not measured
there)."""
_BLOCK_QUERIES = 128
"""Queries of a block: under a causal mask, where the keys after them are left out, and with relative positions, where
the indices of the distances would take more memory than the scores."""


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """Scaled dot-product attention of (B, heads, T, width) whose scores are recomputed in the backward pass.

    Of the tensors as large as the scores only the dropout mask is saved, in a byte per element.

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
        key_mask = None if mask is None else mask.expand(-1, query.shape[1], -1, -1).reshape(len(q), 1, -1)
        out = torch.empty_like(q)
        dropout_masks = []
        for rows, columns in _blocks(q, causal, relative is not None):
            weights = _weights(q, k, products, key_mask, rows, columns, causal)
            if dropout > 0:
                dropout_masks.append(keep_mask(weights.shape, dropout, weights.device))
                weights.mul_(dropout_masks[-1])
            out[rows] = torch.bmm(weights, v[columns])
        if dropout > 0:
            out.mul_(1 / keep_probability(dropout))
        ctx.save_for_backward(q, k, v, products, key_mask, *dropout_masks)
        ctx.causal, ctx.dropout, ctx.shape = causal, dropout, query.shape
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, products, key_mask, *dropout_masks = ctx.saved_tensors
        grad_out = gradients[0].reshape(q.shape) * (1 / keep_probability(ctx.dropout))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_products = None if products is None else torch.empty_like(products)
        scale = q.shape[-1] ** -0.5
        for number, (rows, columns) in enumerate(_blocks(q, ctx.causal, products is not None)):
            weights = _weights(q, k, products, key_mask, rows, columns, ctx.causal)
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
        return (*by_head, None, None, None)


_Block = tuple[tuple[slice, slice], tuple[slice, slice]]


def _blocks(q: Tensor, causal: bool, relative: bool) -> list[_Block]:
    """The rows and columns of the (heads, T, T) scores that are computed at a time."""
    heads, length, _ = q.shape
    block_heads = max(1, _BLOCK_SCORES[q.device.type] // length**2)
    queries = _BLOCK_QUERIES if causal or relative else length
    return [
        (
            (slice(first, first + block_heads), slice(row, row + queries)),
            (slice(first, first + block_heads), slice(0, row + queries if causal else length)),
        )
        for first in range(0, heads, block_heads)
        for row in range(0, length, queries)
    ]


def _weights(
    q: Tensor,
    k: Tensor,
    products: Tensor | None,
    key_mask: Tensor | None,
    rows: tuple[slice, slice],
    columns: tuple[slice, slice],
    causal: bool,
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
    if causal:
        last = scores[:, :, rows[1].start :]
        last.masked_fill_(torch.ones(last.shape[1:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    elif key_mask is not None:
        scores.masked_fill_(~key_mask[columns[0]], -torch.inf)
    return torch.softmax(scores, -1)
