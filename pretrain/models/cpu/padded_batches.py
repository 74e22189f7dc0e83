"""Packed tokens as padded batches, for devices without variable-length kernels, and back.

Padding is a copy of some token. It gets no gradient, so that rows are only copied, in both directions and both passes:
torch's own gradient of a selection is a sum into zeros, which takes several times as long on a CPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PaddedBatch:
    """B sequences, padded to the longest."""

    indices: Tensor
    """int64 (B, T): the packed token at each position."""
    mask: Tensor | None
    """bool (B, T), false at the padding; None without padding."""


@dataclass(frozen=True)
class PaddingIndices:
    """The indices that convert N packed tokens to padded batches of P positions in all, and back."""

    batches: list[PaddedBatch]
    indices: Tensor
    """int64 (P,): the packed token at each position of the flattened, concatenated batches."""
    inverse: Tensor
    """int64 (N,): the position of each packed token."""

    def pad(self, x: Tensor) -> list[Tensor]:
        """(N, W) -> (B, T, W) for each batch."""
        parts = _Pad.apply(x, self.indices, self.inverse).split([batch.indices.numel() for batch in self.batches])
        return [part.view(*batch.indices.shape, -1) for part, batch in zip(parts, self.batches, strict=True)]

    def unpad(self, padded: Tensor) -> Tensor:
        """(P, W) -> (N, W)."""
        out: Tensor = _Unpad.apply(padded, self.inverse)
        return out


def padding_indices(batches: list[PaddedBatch], tokens: int) -> PaddingIndices:
    """The indices for padded batches.

    Args:
        tokens: N; each packed token is in one of the batches.
    """
    indices = torch.cat([batch.indices.flatten() for batch in batches])
    mask = torch.cat(
        [
            (torch.ones_like(batch.indices, dtype=torch.bool) if batch.mask is None else batch.mask).flatten()
            for batch in batches
        ]
    )
    inverse = torch.empty(tokens, dtype=torch.int64, device=indices.device)
    inverse[indices[mask]] = mask.nonzero()[:, 0]
    return PaddingIndices(batches, indices, inverse)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.positions = len(padded)
        return padded.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        zeros = gradients[0].new_zeros(ctx.positions, gradients[0].shape[1])
        return zeros.index_copy_(0, inverse, gradients[0]), None
