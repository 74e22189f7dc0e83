"""Norms of large tensors; splitting BERT-base's embedding changes its squared norm by less than 1e-7 (relative).

On a CPU torch accumulates float32 norms in float32, where small squares are lost in a large sum: the norm of
BERT-base's embedding (30,522 x 768) was 1.3e-3 too small, and that of its halves 4.5e-4 (relative).
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from multihop.pretrain.device_type import device_type

_BLOCK = 1024
"""Number of elements accumulated in float32 on a CPU: converting all to float64 would take three times as long."""


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each tensor, float64 (len(tensors),). On a GPU it takes a few kernels and no sync.

    Args:
        tensors: float32, at least one, all on one device.
    """
    if device_type(tensors[0].device) == "cpu":
        return torch.stack([_squared_norm(tensor.reshape(-1)) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float64)).square()


def _squared_norm(flat: Tensor) -> Tensor:
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
    return blocks.double().square().sum() + flat[whole:].double().square().sum()


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients down to a global norm of `max_norm`, in place, as torch.nn.utils.clip_grad_norm_ does.

    Args:
        max_norm: 0 disables clipping.

    Returns:
        The norm before clipping, float32 (). On a GPU there is no synchronization.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = squared_norms(gradients).sum().sqrt().float()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm or math.inf, norm)
    return norm
