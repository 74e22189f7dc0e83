"""Fine-tuning: the loop that all kinds of task share.

for each epoch:
    unfreeze one more group of layers, if they are unfrozen gradually
    for each batch of examples of similar length:
        step on its mean loss
    score the development examples; remember the weights when no epoch before was better
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from multihop.common.counter_rng import key_of
from multihop.eval.config import TrialSettings
from multihop.eval.finetune.inputs import batches
from multihop.pretrain.optim.norms import clip_grad_norm_
from multihop.pretrain.uncompiled import AdamW

_CLIP_NORM = 1.0
_CURVE_POINTS = 50
_SLANT_RATIO = 32
"""Ratio of the peak learning rate to the first and the last one (Howard and Ruder 2018, section 3.2)."""


class NonFiniteLossError(Exception):
    """The loss, its gradient or a score became infinite or NaN: these settings have no result."""


@dataclass(frozen=True)
class History:
    """The scores and losses of a fine-tuning."""

    dev_value: float
    """The metric on the development examples in the best epoch."""
    best_epoch: float
    loss_curve: list[tuple[int, float]]
    """(steps done, mean training loss since the point before)."""
    dev_curve: list[tuple[int, float]]
    """(steps done, the metric on the development examples)."""


def finetune(
    model: nn.Module,
    lengths: NDArray[np.int64],
    loss_of: Callable[[NDArray[np.int64]], Tensor],
    dev_score: Callable[[], float],
    settings: TrialSettings,
    seed: int,
    layer_groups: Sequence[Sequence[nn.Parameter]] = (),
) -> History:
    """Train `model` with AdamW, warm-up and decay, as Devlin et al. 2018, A.3; it ends with its best weights.

    The order of the batches and the dropout depend on `seed` alone. The best epoch is chosen by the development
    score; of equal ones the earliest.

    Args:
        lengths: int64 (N,), tokens of each training example.
        loss_of: the mean loss of some examples, by their indexes.
        dev_score: the metric on the development examples with the weights as they are.
        layer_groups: all parameters in groups from input to output, for the settings by layer.

    Raises:
        NonFiniteLossError: the loss of a step, its gradient or a development score was infinite or NaN.
    """
    steps_an_epoch = math.ceil(len(lengths) / settings.batch_size)
    steps = max(1, round(settings.epochs * steps_an_epoch))
    # One kernel for all parameters: most of a small model's step would be the optimizer's many small operations.
    groups = parameter_groups(model, settings, layer_groups)
    optimizer = AdamW(groups, lr=settings.lr, fused=True)
    factor = slanted_triangular if settings.schedule == "slanted_triangular" else linear_schedule
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps, settings.warmup_ratio))
    torch.manual_seed(key_of("fine-tuning dropout", seed) >> 1)

    step, best_value, best_epoch = 0, -math.inf, 0.0
    best: dict[str, Tensor] = {}
    losses: list[float] = []
    loss_curve: list[tuple[int, float]] = []
    dev_curve: list[tuple[int, float]] = []
    for epoch in range(math.ceil(steps / steps_an_epoch)):
        model.train()
        if settings.gradual_unfreezing:
            unfreeze(layer_groups, epoch + 1)
        for batch in batches(lengths, settings.batch_size, seed, epoch):
            if step == steps:
                break
            loss = loss_of(batch)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise NonFiniteLossError(f"the loss became {losses[-1]} at step {step + 1} of {steps}; lower eval.lr")
            optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), _CLIP_NORM).item()
            if not math.isfinite(norm):
                raise NonFiniteLossError(f"the gradient became {norm} at step {step + 1} of {steps}; lower eval.lr")
            optimizer.step()
            schedule.step()
            step += 1
            if step * _CURVE_POINTS // steps > (step - 1) * _CURVE_POINTS // steps:
                loss_curve.append((step, sum(losses) / len(losses)))
                losses.clear()
        value = dev_score()
        if not math.isfinite(value):
            raise NonFiniteLossError(f"the development score became {value} at step {step} of {steps}; lower eval.lr")
        dev_curve.append((step, value))
        if value > best_value:
            best_value, best_epoch = value, step / steps_an_epoch
            best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best)
    return History(best_value, best_epoch, loss_curve, dev_curve)


def linear_schedule(step: int, steps: int, warmup_ratio: float) -> float:
    """Return the factor on the learning rate at a 0-based step: linear warm-up over a fraction of them, then linear
    decay to 0."""
    grows = max(1, round(warmup_ratio * steps))
    if step < grows:
        return (step + 1) / grows
    return max(0.0, (steps - step) / (steps - grows + 1))


def slanted_triangular(step: int, steps: int, cut_frac: float) -> float:
    """Return the factor on the learning rate at a 0-based step (Howard and Ruder 2018, equation 3): linear growth from
    1 / 32 over a fraction of the steps, then linear decay to 1 / 32."""
    cut = max(1, round(steps * cut_frac))
    p = step / cut if step < cut else (steps - step) / max(1, steps - cut)
    return (1 + p * (_SLANT_RATIO - 1)) / _SLANT_RATIO


def unfreeze(layer_groups: Sequence[Sequence[nn.Parameter]], count: int) -> None:
    """Train the last `count` groups and freeze the others."""
    for depth, group in enumerate(reversed(layer_groups)):
        for parameter in group:
            parameter.requires_grad_(depth < count)


def parameter_groups(
    model: nn.Module, settings: TrialSettings, layer_groups: Sequence[Sequence[nn.Parameter]]
) -> list[dict[str, object]]:
    """Return the parameters that are trained: weight decay for matrices, none for biases, layer norms and scalars.

    With `layer_lr_decay` each group of layers has rates of its own, which follow from the last group's.
    """
    one_rate = settings.layer_lr_decay == 1
    split = [list(model.parameters())] if one_rate else list(reversed(layer_groups))
    return [
        {
            "params": [p for p in group if p.requires_grad and (p.ndim > 1) == decays],
            "weight_decay": decays * settings.weight_decay,
            "lr": settings.lr * settings.layer_lr_decay**depth,
        }
        for depth, group in enumerate(split)
        for decays in (True, False)
    ]
