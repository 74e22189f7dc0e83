"""Dropout (Srivastava et al. 2014) whose masks cost a quarter of torch's on a CPU.

torch draws one number per element on one core, which takes as long as a matrix product. Here each 64-bit number
decides four elements by 16 bits each: a rate of 0.1 becomes 6554 / 65536 = 0.100006, and the scale is adjusted to it.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.device_type import device_type
from multihop.pretrain.uncompiled import uncompiled

_LEVELS = 2**16
_CPU = torch.device("cpu")


class Dropout(nn.Module):
    """Zeroes each element with probability `rate` and scales the others; the identity in evaluation mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """x and the result have any shape."""
        if not self.training or self.rate == 0.0:
            return x
        if device_type(x.device) != "cpu":
            return F.dropout(x, self.rate)
        out: Tensor = _drop(x, self.rate)
        return out


def keep_probability(rate: float) -> float:
    """The probability that `keep_mask` keeps an element."""
    return 1 - round(rate * _LEVELS) / _LEVELS


def keep_mask(shape: torch.Size, rate: float, device: torch.device = _CPU) -> Tensor:
    """A bool tensor of `shape`, false with probability `rate`, drawn from torch's default generator of the device."""
    elements = prod(shape)
    bits = torch.empty((elements + 3) // 4, dtype=torch.int64, device=device).random_(-(2**63), None)
    return bits.view(torch.int16)[:elements].view(shape) >= round(rate * _LEVELS) - _LEVELS // 2


@uncompiled
def _drop(x: Tensor, rate: float) -> Any:
    return _Drop.apply(x, rate)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        kept = keep_mask(x.shape, rate)
        ctx.save_for_backward(kept)
        ctx.scale = 1 / keep_probability(rate)
        return torch.where(kept, x, 0.0).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return torch.where(kept, gradients[0], 0.0).mul_(ctx.scale), None
