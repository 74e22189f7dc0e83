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
        label_smoothing: as in `vocabulary_loss`.

    Returns:
        Sum of the cross-entropies, fp32 ().
    """
    loss: Tensor = _compiled()(logits, targets, vocabulary, label_smoothing)
    return loss


@cache
def _compiled() -> Any:
    """Compiled at its first call, for all numbers of rows."""
    return torch.compile(_replace_by_gradient, dynamic=True)


def _replace_by_gradient(logits: Tensor, targets: Tensor, vocabulary: int, label_smoothing: float) -> Tensor:
    column = torch.arange(logits.shape[1], device=logits.device)
    real, spread = column < vocabulary, label_smoothing / vocabulary
    wide = torch.where(real, logits.float(), -torch.inf)
    log_sum = wide.logsumexp(1, keepdim=True)
    at_target = logits.gather(1, targets).float()
    loss = log_sum - (1 - label_smoothing) * at_target
    if label_smoothing:
        loss -= spread * torch.where(real, wide, 0.0).sum(1, keepdim=True)
    gradient = (wide - log_sum).exp() - (column == targets) * (1 - label_smoothing)
    logits.copy_(torch.where(real, gradient - spread, 0.0))
    return loss.sum()
