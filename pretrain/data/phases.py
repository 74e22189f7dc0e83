"""Steps, phases, batch sizes and ranks' shares of a step, computed from the recipe alone. Steps are 0-based."""

import math
from collections.abc import Sequence

from multihop.common.errors import UserError
from multihop.pretrain.config import PhaseConfig
from multihop.pretrain.models.config import ModelConfig


def total_steps(phases: Sequence[PhaseConfig]) -> int:
    """Number of optimizer steps in all phases."""
    return sum(phase.steps for phase in phases)


def locate(phases: Sequence[PhaseConfig], step: int) -> tuple[int, int]:
    """The phase of a step, and the step's number within it; all are 0-based.

    Raises:
        UserError: the phases have no such step.
    """
    if step < 0:
        raise UserError(f"step must be >= 0, got {step}")
    within = step
    for number, phase in enumerate(phases):
        if within < phase.steps:
            return number, within
        within -= phase.steps
    raise UserError(f"step must be < {total_steps(phases)}, the number of steps of all phases, got {step}")


def model_after(model: ModelConfig, phases: Sequence[PhaseConfig], steps: int) -> ModelConfig:
    """A run's model as it is after `steps` steps, or before the first: a phase may have another `global_rope_theta`."""
    last = min(max(steps, 1), total_steps(phases)) - 1
    theta = phases[locate(phases, last)[0]].global_rope_theta
    return model if theta is None else model.model_copy(update={"global_rope_theta": theta})


def batch_size_of(phase: PhaseConfig, step_in_phase: int) -> int:
    """The number of samples of a phase's step `step_in_phase`, over all ranks.

    With `global_batch_tokens` it is 1, the step's batch of pairs: see `multihop.pretrain.data.token_batches`.
    """
    if phase.global_batch_tokens is not None:
        return 1
    for segment in phase.batch_ramp:
        if step_in_phase < segment.steps:
            return segment.global_batch_size
        step_in_phase -= segment.steps
    return phase.global_batch_size


def samples_before(phases: Sequence[PhaseConfig], step: int) -> int:
    """The number of samples that the first `step` steps consume, skipped steps included.

    Raises:
        UserError: the phases have fewer steps.
    """
    if not 0 <= step <= total_steps(phases):
        raise UserError(f"step must be between 0 and {total_steps(phases)}, got {step}")
    used = 0
    for phase in phases:
        used += samples_in_phase(phase, min(step, phase.steps))
        step -= min(step, phase.steps)
    return used


def is_skipped(phases: Sequence[PhaseConfig], step: int) -> bool:
    """Whether phases[].skip_steps lists a step, whose samples are then consumed without being trained on."""
    number, _ = locate(phases, step)
    return step in phases[number].skip_steps


def share_of_rank(batch_size: int, rank: int, world_size: int) -> slice:
    """The part of a step's samples that a rank takes; shares differ by one sample at most."""
    return slice(batch_size * rank // world_size, batch_size * (rank + 1) // world_size)


def micro_steps(batch_size: int, world_size: int, micro_batch_size: int) -> int:
    """The number of micro-batches of a step: those of the largest share, the same on every rank."""
    largest_share = math.ceil(batch_size / world_size)
    return math.ceil(largest_share / micro_batch_size)


def samples_in_phase(phase: PhaseConfig, steps: int) -> int:
    """The number of samples in a phase's first `steps` steps; with `global_batch_tokens`, the number of batches."""
    if phase.global_batch_tokens is not None:
        return steps
    used = 0
    for segment in phase.batch_ramp:
        used += min(steps, segment.steps) * segment.global_batch_size
        steps -= min(steps, segment.steps)
    return used + steps * phase.global_batch_size
