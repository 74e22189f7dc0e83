"""How the batch for a step is chosen: `batch(step) = f(seed, data fingerprint, phases, step)` and nothing else.

A step belongs to a phase and takes the next `batch_size` positions of that phase's endless stream. Position p of
the stream is sample `permutation_e(p mod n)` of epoch `e = p // n`, where n is the number of samples of the phase's
index and each epoch has its own keyed permutation. No state is kept: to resume is to know one integer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrain.config import PhaseConfig
from pretrain.keyed import key_of, permute


@dataclass(frozen=True)
class StepSamples:
    """The samples of one optimizer step, in the order in which ranks share them out."""

    phase: int
    samples: NDArray[np.int64]
    """(batch_size,) positions in the phase's sample index."""
    epochs: NDArray[np.int64]
    """(batch_size,) how often each of them was used before: what its mask is keyed by."""


def total_steps(phases: Sequence[PhaseConfig]) -> int:
    """Optimizer steps of all phases."""
    return sum(phase.steps for phase in phases)


def locate(phases: Sequence[PhaseConfig], step: int) -> tuple[int, int]:
    """The phase that step `step` (from 0) belongs to, and the step's number within it."""
    for number, phase in enumerate(phases):
        if step < phase.steps:
            return number, step
        step -= phase.steps
    raise ValueError(f"step {step + total_steps(phases)} lies behind the last of {total_steps(phases)} steps")


def samples_of_step(
    seed: int, fingerprint: str, phases: Sequence[PhaseConfig], index_sizes: Sequence[int], step: int
) -> StepSamples:
    """Which samples step `step` (from 0) uses.

    Args:
        fingerprint: the data's.
        index_sizes: samples in each phase's index.
    """
    number, step_in_phase = locate(phases, step)
    size, batch_size = index_sizes[number], phases[number].batch_size
    first = step_in_phase * batch_size
    positions = np.arange(first, first + batch_size, dtype=np.int64)
    epochs, within = positions // size, positions % size
    samples = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        key = key_of("order", seed, fingerprint, number, int(epoch))
        samples[chosen] = permute(within[chosen].astype(np.uint64), size, key).astype(np.int64)
    return StepSamples(number, samples, epochs)


def share_of_rank(batch_size: int, rank: int, world_size: int) -> slice:
    """The part of a step's samples that a rank takes; shares differ by one sample where they cannot be equal."""
    return slice(batch_size * rank // world_size, batch_size * (rank + 1) // world_size)


def micro_steps(batch_size: int, world_size: int, micro_batch: int) -> int:
    """Passes through the model a step takes: the same number on every rank, the largest share's."""
    largest_share = math.ceil(batch_size / world_size)
    return math.ceil(largest_share / micro_batch)
