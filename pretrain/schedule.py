"""Learning rates as pure functions of the step."""

import math
from collections.abc import Sequence

from pretrain.config import PhaseConfig
from pretrain.order import locate


def factor(schedule: str, step: int, steps: int, warmup_steps: int) -> float:
    """Share of the highest rate at step `step` (from 0) of `steps`: linear warm-up from 1/warmup_steps, then decay.

    linear and cosine end just above 0 at the last step; constant stays at 1.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    assert schedule == "constant", schedule
    return 1.0


def learning_rate(phases: Sequence[PhaseConfig], step: int) -> float:
    """The learning rate of step `step` (from 0); every phase warms up anew."""
    number, step_in_phase = locate(phases, step)
    phase = phases[number]
    return phase.lr * factor(phase.schedule, step_in_phase, phase.steps, round(phase.warmup * phase.steps))
