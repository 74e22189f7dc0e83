"""Rotary position embeddings (Su et al. 2021, section 3.2): queries and keys are rotated by their positions."""

from typing import Any

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""The cosines and sines of N tokens' angles, float32 (N, 1, width / 2) each."""


def rotation_of(positions: Tensor, width: int, theta: float) -> Rotation:
    """The rotation of each position: pair i of a head is rotated by position / theta**(2i / width).

    Computed in float32, as transformers does: at position 8,000 the rounding of an angle is 2e-4 of a radian, so that
    other arithmetic would be another model.

    Args:
        positions: int64 (N,).
        width: the width of a head, an even number.
        theta: the base of the wavelengths.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    angles = positions.float()[:, None] * (1.0 / theta**exponents)
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the queries or keys of N tokens, (N, heads, width).

    Element i is paired with element i + width / 2, as in GPT-NeoX and transformers; Su et al. pair neighbors, which is
    the same but for the order of columns.
    """
    rotated: Tensor = _Rotate.apply(x, *rotation)
    return rotated


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation backwards, for which no activation has to be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
