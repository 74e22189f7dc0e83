"""Packed rows as rectangles of padded sequences, for devices without kernels for many lengths, and back.

Padding is a copy of some row. It gets no gradient, so that rows are only copied, in both directions and both passes:
torch's own gradient of a selection is a sum into zeros, which takes several times as long on a CPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rectangle:
    """B sequences, padded to the longest."""

    at: Tensor
    """int64 (B, T): the packed row of each element."""
    real: Tensor | None
    """bool (B, T), false at the padding; None without padding."""


@dataclass(frozen=True)
class RowPositions:
    """The positions of N packed rows in some rectangles, whose P elements follow one another."""

    rectangles: list[Rectangle]
    at: Tensor
    """int64 (P,): the packed row of each element."""
    order: Tensor
    """int64 (N,): the element of each packed row."""

    def spread(self, x: Tensor) -> list[Tensor]:
        """(N, W) -> (B, T, W) of each rectangle."""
        parts = _Spread.apply(x, self.at, self.order).split([each.at.numel() for each in self.rectangles])
        return [part.view(*each.at.shape, -1) for part, each in zip(parts, self.rectangles, strict=True)]

    def gather(self, rows: Tensor) -> Tensor:
        """(P, W) -> (N, W)."""
        out: Tensor = _Gather.apply(rows, self.order)
        return out


def row_positions(rectangles: list[Rectangle], rows: int) -> RowPositions:
    """Args: rows: N; each is in one rectangle."""
    at = torch.cat([each.at.flatten() for each in rectangles])
    real = torch.cat(
        [
            (torch.ones_like(each.at, dtype=torch.bool) if each.real is None else each.real).flatten()
            for each in rectangles
        ]
    )
    order = torch.empty(rows, dtype=torch.int64, device=at.device)
    order[at[real]] = real.nonzero()[:, 0]
    return RowPositions(rectangles, at, order)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.positions = len(rows)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        zeros = gradients[0].new_zeros(ctx.positions, gradients[0].shape[1])
        return zeros.index_copy_(0, order, gradients[0]), None
