"""Learning rates as pure functions of the step."""

import math
from collections.abc import Sequence

from multihop.pretrain.config import PhaseConfig
from multihop.pretrain.data.phases import batch_size_of, locate


def learning_rate(phases: Sequence[PhaseConfig], step: int) -> float:
    """The learning rate of the 0-based step `step`; each phase has its own warm-up and depends on no other.

    Raises:
        UserError: the phases have no such step.
    """
    number, step_in_phase = locate(phases, step)
    phase = phases[number]
    return phase.lr * factor(phase, step_in_phase) * batch_factor(phase, step_in_phase)


def factor(phase: PhaseConfig, step: int) -> float:
    """The factor of a phase's peak rate at its 0-based step `step`, before scaling by the batch size.

    Warm-up is linear and reaches 1 at its last step. The decay after it (linear, cosine, polynomial, or at the end of
    warmup-stable-decay) begins at 1 and would reach `min_lr_ratio` one step after the phase, so that no step has a rate
    of 0. inverse-sqrt is equation 3 of Vaswani et al. 2017 with a peak of 1; it does not end, and without warm-up it
    begins as after one step of it. warmup-stable-decay: Hu et al. 2024 (MiniCPM), section 4, with a linear decay.
    """
    warmup = phase.warmup_length
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, phase.steps - warmup)
    match phase.schedule:
        case "constant":
            return 1.0
        case "inverse-sqrt":
            return math.sqrt(max(1, warmup) / (step + 1))
        case "linear":
            shape = 1.0 - progress
        case "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "polynomial":
            shape = (1.0 - progress) ** phase.power
        case "warmup-stable-decay":
            shape = min(1.0, (phase.steps - step) / phase.decay_length)
    return phase.min_lr_ratio + (1.0 - phase.min_lr_ratio) * shape


def batch_factor(phase: PhaseConfig, step: int) -> float:
    """The factor for the batch size of the phase's 0-based step `step`."""
    if phase.lr_scaling is None:
        return 1.0
    ratio = batch_size_of(phase, step) / phase.lr_scaling.global_batch_size
    return math.sqrt(ratio) if phase.lr_scaling.rule == "sqrt" else ratio
