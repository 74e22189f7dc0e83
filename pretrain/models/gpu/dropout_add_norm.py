"""Dropout, the residual sum and the layer norm after it in one kernel, and their gradients in another.

Each of these operations alone is limited by memory. Together they read their inputs and write their results once, and
keep only the sum and two numbers for each row. flash-attn has such a kernel under the name dropout_add_layer_norm.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from multihop.pretrain.models.gpu.keep_mask import draw_seed, dropout_arguments, is_kept
from multihop.pretrain.models.gpu.kernel import launch, next_power_of_2, tl, triton
from multihop.pretrain.uncompiled import uncompiled

_PROGRAMS = 16
"""Programs of the backward pass on each multiprocessor; each adds up the gradients of the weights over its rows."""


@uncompiled
def dropout_add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: float) -> Tensor:
    """The layer norm of residual + dropout(x).

    Args:
        x, residual: (N, H), of one dtype. Their sum is rounded to it; all else is computed in fp32.
        weight, bias: (H,).
        dropout: the dropout rate. The mask is drawn from torch's generator of the device.

    Returns:
        (N, H).
    """
    out: Tensor = _DropoutAddNorm.apply(x, residual, weight, bias, eps, dropout)
    return out


class _DropoutAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: float
    ) -> Tensor:
        x, residual, weight, bias = (part.contiguous() for part in (x, residual, weight, bias))
        rows, width = x.shape
        seed = draw_seed(dropout, x.device)
        total, out = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = torch.empty(2, rows, dtype=torch.float32, device=x.device)
        options = _options(width, dropout)
        launch(_forward, (rows,), x, residual, weight, bias, total, out, mean, rstd, seed, eps, **options)
        ctx.save_for_backward(total, weight, mean, rstd, seed)
        ctx.dropout, ctx.bias_dtype = dropout, bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd, seed = ctx.saved_tensors
        rows, width = total.shape
        grad_residual = torch.empty_like(total)
        grad_x = torch.empty_like(total) if ctx.dropout > 0 else grad_residual
        programs = max(1, min(rows, _programs(total.device)))
        sums = torch.empty(2, programs, width, dtype=torch.float32, device=total.device)
        inputs = gradients[0].contiguous(), total, weight, mean, rstd
        options = _options(width, ctx.dropout)
        launch(_backward, (programs,), *inputs, grad_x, grad_residual, sums, seed, rows, **options)
        grad_weight, grad_bias = sums.sum(1)
        return grad_x, grad_residual, grad_weight.to(weight.dtype), grad_bias.to(ctx.bias_dtype), None, None


def _programs(device: torch.device) -> int:
    has_properties = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if has_properties else 1
    return _PROGRAMS * processors


def _options(width: int, dropout: float) -> dict[str, Any]:
    """The arguments that both passes share."""
    threshold, dropout_scale = dropout_arguments(dropout)
    block = next_power_of_2(width)
    return {
        "threshold": threshold,
        "dropout_scale": dropout_scale,
        "WIDTH": width,
        "BLOCK": block,
        "DROPS": dropout > 0,
        "num_warps": min(max(block // 256, 1), 16),
    }


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # no types: Triton would compile them
def _forward(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    bias,
    total,
    out,
    means,
    rstds,
    seed,
    eps,
    threshold,
    dropout_scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DROPS: tl.constexpr,
):
    """Compute one row."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    at = row.to(tl.int64) * WIDTH + column
    values = tl.load(x + at, mask=within, other=0.0).to(tl.float32)
    if DROPS:
        values = tl.where(is_kept(seed, threshold, row, column), values * dropout_scale, 0.0)
    values += tl.load(residual + at, mask=within, other=0.0).to(tl.float32)
    values = values.to(total.dtype.element_ty)
    tl.store(total + at, values, mask=within)
    values = values.to(tl.float32)
    mean = tl.sum(values, 0) / WIDTH
    centered = tl.where(within, values - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, 0) / WIDTH + eps)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)
    scaled = centered * rstd * tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    result = scaled + tl.load(bias + column, mask=within, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=within)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(  # type: ignore[no-untyped-def]
    grad_out,
    total,
    weight,
    means,
    rstds,
    grad_x,
    grad_residual,
    sums,
    seed,
    rows,
    threshold,
    dropout_scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DROPS: tl.constexpr,
):
    """Compute the gradients of every P-th row, and add up those of the weights over them, for P programs."""
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    scale = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    grad_weight, grad_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rows - tl.program_id(0), tl.num_programs(0)):
        row = tl.program_id(0) + first
        at = row.to(tl.int64) * WIDTH + column
        gradient = tl.load(grad_out + at, mask=within, other=0.0).to(tl.float32)
        values = tl.load(total + at, mask=within, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row)
        normed = tl.where(within, (values - tl.load(means + row)) * rstd, 0.0)
        grad_weight += gradient * normed
        grad_bias += gradient
        scaled = gradient * scale
        along = tl.sum(scaled * normed, 0) / WIDTH
        result = rstd * (scaled - tl.sum(scaled, 0) / WIDTH - normed * along)
        tl.store(grad_residual + at, result.to(grad_residual.dtype.element_ty), mask=within)
        if DROPS:
            result = tl.where(is_kept(seed, threshold, row, column), result * dropout_scale, 0.0)
            tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=within)
    at = tl.program_id(0) * WIDTH + column
    tl.store(sums + at, grad_weight, mask=within)
    tl.store(sums + tl.num_programs(0) * WIDTH + at, grad_bias, mask=within)
