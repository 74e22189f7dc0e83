"""Attention of packed sequences of at most 128 tokens, on a GPU.

The keys and values of a sequence and head, and the scores of 32 or 64 queries, fit on the chip, so that one program
computes a sequence and head, its gradients too: nothing is added up across programs, and nothing is stored between the
passes but their inputs.
FlashAttention 2 splits its backward pass over blocks of keys and adds up the queries' gradients in fp32 memory, which
long sequences need.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from multihop.pretrain.models.gpu.keep_mask import draw_seed, dropout_arguments, is_kept
from multihop.pretrain.models.gpu.kernel import launch, next_power_of_2, tl, triton
from multihop.pretrain.uncompiled import uncompiled

_LOG2_E = tl.constexpr(1.4426950408889634)


@uncompiled
def short_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, dropout: float
) -> Tensor:
    """Scaled dot-product attention of each token to the tokens of its sequence.

    Args:
        query, key, value: bf16 or fp16 (N, heads, width), width 16, 32 or 64.
        cu_seqlens: int32 (S + 1,): cumulative sequence lengths, from 0 to N.
        max_seqlen: the length of the longest sequence, at most 128.
        causal: whether a token attends only to itself and the tokens before it.
        dropout: the dropout rate of the attention weights. Their mask is drawn from torch's generator of the device.

    Returns:
        (N, heads, width).
    """
    out: Tensor = _ShortAttention.apply(query, key, value, cu_seqlens, max_seqlen, causal, dropout)
    return out


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        seed = draw_seed(dropout, query.device)
        out = torch.empty_like(query)
        grid, options = _options(query, cu_seqlens, max_seqlen, causal, dropout)
        inputs = query, key, value, out, cu_seqlens, seed
        launch(_forward, grid, *inputs, **options, ROWS=min(options["BLOCK"], 64))
        ctx.save_for_backward(query, key, value, cu_seqlens, seed)
        ctx.max_seqlen, ctx.causal, ctx.dropout = max_seqlen, causal, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, cu_seqlens, seed = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty_like(part) for part in (query, key, value))
        grid, options = _options(query, cu_seqlens, ctx.max_seqlen, ctx.causal, ctx.dropout)
        inputs = query, key, value, gradients[0].contiguous()
        rows = 32 if options["BLOCK"] > 64 else options["BLOCK"]  # more would not fit into the registers
        outputs = grad_query, grad_key, grad_value
        launch(_backward, grid, *inputs, *outputs, cu_seqlens, seed, **options, ROWS=rows)
        return grad_query, grad_key, grad_value, None, None, None, None


def _options(
    query: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, dropout: float
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid and the arguments that both passes share."""
    _, heads, width = query.shape
    threshold, dropout_scale = dropout_arguments(dropout)
    options = {
        "scale": width**-0.5,
        "threshold": threshold,
        "dropout_scale": dropout_scale,
        "HEADS": heads,
        "WIDTH": width,
        "BLOCK": max(16, next_power_of_2(max_seqlen)),
        "CAUSAL": causal,
        "DROPS": dropout > 0,
        "num_warps": 4,
    }
    return (len(cu_seqlens) - 1, heads), options


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # no types: Triton would compile them
def _forward(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    out,
    cu_seqlens,
    seed,
    scale,
    threshold,
    dropout_scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
):
    """Compute one sequence and head, some rows at a time."""
    base, length = _bounds(cu_seqlens, HEADS, WIDTH)
    k, v = _load(key + base, 0, length, HEADS, WIDTH, BLOCK), _load(value + base, 0, length, HEADS, WIDTH, BLOCK)
    for start in range(0, length, ROWS):
        q = _load(query + base, start, length, HEADS, WIDTH, ROWS)
        weights = _attention_weights(q, k, start, length, scale, BLOCK, ROWS, CAUSAL)
        if DROPS:
            kept = _keep_mask(seed, threshold, start, HEADS, BLOCK, ROWS)
            weights = tl.where(kept, weights * dropout_scale, 0.0)
        _store(out + base, tl.dot(weights.to(v.dtype), v), start, length, HEADS, WIDTH, ROWS)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    grad_out,
    grad_query,
    grad_key,
    grad_value,
    cu_seqlens,
    seed,
    scale,
    threshold,
    dropout_scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
):
    """Compute the gradients of one sequence and head, some rows at a time."""
    base, length = _bounds(cu_seqlens, HEADS, WIDTH)
    k, v = _load(key + base, 0, length, HEADS, WIDTH, BLOCK), _load(value + base, 0, length, HEADS, WIDTH, BLOCK)
    grad_k, grad_v = tl.zeros((BLOCK, WIDTH), tl.float32), tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(0, length, ROWS):
        q = _load(query + base, start, length, HEADS, WIDTH, ROWS)
        grad = _load(grad_out + base, start, length, HEADS, WIDTH, ROWS)
        weights = _attention_weights(q, k, start, length, scale, BLOCK, ROWS, CAUSAL)
        grad_weights = tl.dot(grad, tl.trans(v))
        dropped = weights
        if DROPS:
            kept = _keep_mask(seed, threshold, start, HEADS, BLOCK, ROWS)
            grad_weights = tl.where(kept, grad_weights * dropout_scale, 0.0)
            dropped = tl.where(kept, weights * dropout_scale, 0.0)
        grad_v = tl.dot(tl.trans(dropped.to(v.dtype)), grad, grad_v)
        mean = tl.sum(weights * grad_weights, 1)
        grad_scores = (weights * (grad_weights - mean[:, None]) * scale).to(v.dtype)
        _store(grad_query + base, tl.dot(grad_scores, k), start, length, HEADS, WIDTH, ROWS)
        grad_k = tl.dot(tl.trans(grad_scores), q, grad_k)
    _store(grad_key + base, grad_k, 0, length, HEADS, WIDTH, BLOCK)
    _store(grad_value + base, grad_v, 0, length, HEADS, WIDTH, BLOCK)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _bounds(cu_seqlens, HEADS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The offset of this program's sequence and head, int64, and the length of the sequence."""
    first = tl.load(cu_seqlens + tl.program_id(0))
    length = tl.load(cu_seqlens + tl.program_id(0) + 1) - first
    return first.to(tl.int64) * (HEADS * WIDTH) + tl.program_id(1) * WIDTH, length


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load(pointer, start, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens from `start` on of a sequence and head, (ROWS, WIDTH), zeros after its end."""
    rows = start + tl.arange(0, ROWS)
    offsets = rows[:, None] * (HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointer + offsets, mask=(rows < length)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store(pointer, values, start, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write what `_load` reads."""
    rows = start + tl.arange(0, ROWS)
    offsets = rows[:, None] * (HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=(rows < length)[:, None])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attention_weights(  # type: ignore[no-untyped-def]
    q, k, start, length, scale, BLOCK: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr
):
    """The softmax of the scores, fp32 (ROWS, BLOCK), zero at the keys that a query does not attend to."""
    columns = tl.arange(0, BLOCK)[None, :]
    is_attended = columns < length
    if CAUSAL:
        is_attended = is_attended & (columns <= start + tl.arange(0, ROWS)[:, None])
    scores = tl.where(is_attended, tl.dot(q, tl.trans(k)) * (scale * _LOG2_E), float("-inf"))
    exponentials = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return exponentials * (1.0 / tl.sum(exponentials, 1))[:, None]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep_mask(seed, threshold, start, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The dropout's mask of some rows, (ROWS, BLOCK)."""
    row = (tl.program_id(0) * HEADS + tl.program_id(1)) * BLOCK + start + tl.arange(0, ROWS)
    return is_kept(seed, threshold, row[:, None], tl.arange(0, BLOCK)[None, :])
