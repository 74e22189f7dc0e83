"""The gradient's norm under ZeRO, which the host reads once a step.

DeepSpeed checks the gradient for a NaN or an infinity tensor by tensor, then checks its norm, and checks the norm again
wherever it clips. Each check makes the host wait for the device. Whatever is non-finite shows in the norm, so the norm
is computed on the device without a check and copied to the host, where DeepSpeed's own checks of it cost nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from multihop.pretrain.optim.norms import squared_norms


def read_norm_once(zero: Any, stage: int, all_reduce_sum_: Callable[[Tensor], None]) -> None:
    """Make DeepSpeed's ZeRO optimizer of stage 1, 2 or 3 copy the gradient's norm to the host and read nothing else.

    With an offloaded optimizer DeepSpeed's own norm, which reads once a parameter, stays.
    """

    def group_norm(gradients: Iterable[Tensor], parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of a parameter group's gradients over all ranks, float64 () on the device."""
        assert norm_type == 2.0
        real = (gradient.detach() for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        each = [gradient for gradient, _ in zip(real, parameters, strict=False)]
        none = torch.zeros((), dtype=torch.float64, device=zero.device)
        square = squared_norms(each).sum() if each else none
        all_reduce_sum_(square)
        return square.sqrt()

    zero.check_overflow = _do_nothing
    zero.get_grad_norm_direct = group_norm
    if stage == 3:
        norm_groups = zero._get_norm_groups
        zero._get_norm_groups = lambda: torch.stack(norm_groups()).cpu().unbind()
    else:
        global_norm = zero.scaled_global_norm
        zero.scaled_global_norm = lambda: global_norm().cpu()


def _do_nothing(*_: object, **__: object) -> None:
    """In place of a check that the norm makes unnecessary."""
