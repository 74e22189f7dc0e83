"""The cross-entropy of a softmax and its gradient, in the memory of the logits, on a GPU.

It is written in plain operations and compiled: fused, they store no fp32 copy of the logits, which are much larger
than anything else in a step.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def softmax_gradient_(logits: Tensor, targets: Tensor, vocab_size: int, label_smoothing: float) -> Tensor:
    """Replace each row of logits by the gradient of its cross-entropy.

    Args:
        logits: (M, C), C >= vocab_size; the other columns are padding of any value, and become 0.
        targets: int64 (M, 1).
        label_smoothing: as in `fused_linear_cross_entropy`.

    Returns:
        Sum of the cross-entropies, fp32 ().
    """
    log_sum, loss = _compiled(_losses)(logits, targets, vocab_size, label_smoothing)
    _compiled(_replace_by_gradient)(logits, targets, log_sum, vocab_size, label_smoothing)
    total: Tensor = loss
    return total


@cache
def _compiled(function: Any) -> Any:
    """A compiled function for any number of rows, which compiles in its first call.

    The function that reads the logits and the one that replaces them are compiled separately: from both in one
    function, torch 2.11 generates CPU code that returns wrong losses with the right gradients.
    """
    return torch.compile(function, dynamic=True)


def _losses(logits: Tensor, targets: Tensor, vocab_size: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's sum of exponentials, fp32 (M, 1), and the sum of the cross-entropies."""
    in_vocabulary = torch.arange(logits.shape[1], device=logits.device) < vocab_size
    wide = logits.float()
    log_sum = torch.where(in_vocabulary, wide, -torch.inf).logsumexp(1, keepdim=True)
    loss = log_sum - (1 - label_smoothing) * logits.gather(1, targets).float()
    if label_smoothing:
        loss -= label_smoothing / vocab_size * torch.where(in_vocabulary, wide, 0.0).sum(1, keepdim=True)
    return log_sum, loss.sum()


def _replace_by_gradient(
    logits: Tensor, targets: Tensor, log_sum: Tensor, vocab_size: int, label_smoothing: float
) -> None:
    column = torch.arange(logits.shape[1], device=logits.device)
    gradient = (logits.float() - log_sum).exp() - (column == targets) * (1 - label_smoothing)
    logits.copy_(torch.where(column < vocab_size, gradient - label_smoothing / vocab_size, 0.0))
