"""The cross-entropy of a softmax and its gradient, in the memory of the logits, on a GPU.

Written in plain operations and compiled, so that they are fused, and no copy of the logits in fp32, which are much
larger than anything else in a step, is stored.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def softmax_gradient_(logits: Tensor, targets: Tensor, vocabulary: int, label_smoothing: float) -> Tensor:
    """Replace each row of logits by the gradient of its cross-entropy.

    Args:
        logits: (M, C), C >= vocabulary; the other columns are padding, of any value, and become 0.
        targets: int64 (M, 1).
        label_smoothing: as in `fused_linear_cross_entropy`.

    Returns:
        Sum of the cross-entropies, fp32 ().
    """
    log_sum, loss = _compiled(_losses)(logits, targets, vocabulary, label_smoothing)
    _compiled(_replace_by_gradient)(logits, targets, log_sum, vocabulary, label_smoothing)
    total: Tensor = loss
    return total


@cache
def _compiled(function: Any) -> Any:
    """Compiled at its first call, for all numbers of rows.

    What reads the logits and what replaces them are compiled apart: of both in one function, torch 2.11 makes code for
    a CPU that returns wrong losses, with the right gradients.
    """
    return torch.compile(function, dynamic=True)


def _losses(logits: Tensor, targets: Tensor, vocabulary: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's sum of exponentials, fp32 (M, 1), and the sum of the cross-entropies."""
    real = torch.arange(logits.shape[1], device=logits.device) < vocabulary
    wide = logits.float()
    log_sum = torch.where(real, wide, -torch.inf).logsumexp(1, keepdim=True)
    loss = log_sum - (1 - label_smoothing) * logits.gather(1, targets).float()
    if label_smoothing:
        loss -= label_smoothing / vocabulary * torch.where(real, wide, 0.0).sum(1, keepdim=True)
    return log_sum, loss.sum()


def _replace_by_gradient(
    logits: Tensor, targets: Tensor, log_sum: Tensor, vocabulary: int, label_smoothing: float
) -> None:
    column = torch.arange(logits.shape[1], device=logits.device)
    gradient = (logits.float() - log_sum).exp() - (column == targets) * (1 - label_smoothing)
    logits.copy_(torch.where(column < vocabulary, gradient - label_smoothing / vocabulary, 0.0))
