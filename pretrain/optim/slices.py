"""Slices of parameters in the flat buffers of ZeRO, and the kernel that updates a buffer as AdamW does."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of one flattened parameter that this rank is responsible for."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    start: int
    """Offset of the slice in the flattened parameter, in elements."""
    numel: int
    flat: Tensor
    """The flat buffer that is the optimizer's parameter, and the key of its state."""
    flat_start: int
    """Offset of the slice in `flat`, in elements."""

    def view_of(self, tensor: Tensor) -> Tensor:
        """This slice as a view, (numel,), of a tensor with the layout of `flat`: the weights or a moment."""
        return tensor.view(-1)[self.flat_start : self.flat_start + self.numel]


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of a whole parameter, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def fused_adamw(
    group: dict[str, Any],
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float,
    weight_decay: float,
) -> None:
    """The kernel of torch.optim.AdamW(fused=True): moments and weights in one pass over memory."""
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [weight],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
