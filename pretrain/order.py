"""How the batch for a step is chosen: `batch(step) = f(seed, data fingerprint, phases, step)` and nothing else.

Step N is the one that is taken when N steps are done. It belongs to a phase and takes the next positions of that
phase's endless stream, as many as the batch size is by then. No state is kept: to resume is to know one integer.

Without weights, position p of the stream is sample `permutation_e(p mod n)` of epoch `e = p // n`, where n is the
number of samples of the phase's index and each epoch has its own keyed permutation.

With weights, each source has an index and a stream of that kind of its own. The phase's stream is cut into blocks of
2^16 positions; each source has the same whole number of them in every block, in an order that a keyed permutation
decides anew for each block. The r-th of a source's q positions in block b is position `b * q + r` of its own stream,
so that a source begins an epoch when the one before it is through.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pretrain.config import PhaseConfig
from pretrain.keyed import key_of, permute

MIXTURE_BLOCK = 2**16
"""Positions within which the weights hold exactly; at most so many sources can be mixed."""

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class StepSamples:
    """The samples of one optimizer step, in the order in which ranks share them out."""

    phase: int
    sources: Int64
    """(batch_size,) which of the phase's indexes each sample stands in: 0 without weights."""
    samples: Int64
    """(batch_size,) places in the phase's indexes, those of one source numbered behind those of the one before it."""
    epochs: Int64
    """(batch_size,) how often each of them was used before: what its mask is keyed by."""


def total_steps(phases: Sequence[PhaseConfig]) -> int:
    """Optimizer steps of all phases."""
    return sum(phase.steps for phase in phases)


def locate(phases: Sequence[PhaseConfig], step: int) -> tuple[int, int]:
    """The phase that step `step` (from 0) belongs to, and the step's number within it.

    Raises:
        ValueError: there is no such step.
    """
    if step < 0:
        raise ValueError(f"step {step} is not one; steps are counted from 0")
    within = step
    for number, phase in enumerate(phases):
        if within < phase.steps:
            return number, within
        within -= phase.steps
    raise ValueError(f"step {step} lies behind the last of {total_steps(phases)} steps, which are counted from 0")


def batch_size_of(phase: PhaseConfig, step_in_phase: int) -> int:
    """Samples of a step of a phase, over all ranks."""
    for stage in phase.batch_ramp:
        if step_in_phase < stage.steps:
            return stage.batch_size
        step_in_phase -= stage.steps
    return phase.batch_size


def samples_before(phases: Sequence[PhaseConfig], step: int) -> int:
    """Samples that the steps from 0 to `step - 1` use up, those of steps that are skipped counted.

    Raises:
        ValueError: there are not so many steps.
    """
    if not 0 <= step <= total_steps(phases):
        raise ValueError(f"{step} steps cannot be done of {total_steps(phases)}")
    used = 0
    for phase in phases:
        used += _samples_in_phase(phase, min(step, phase.steps))
        step -= min(step, phase.steps)
    return used


def is_skipped(phases: Sequence[PhaseConfig], step: int) -> bool:
    """Whether the recipe passes over step `step` (from 0): its samples are used up without being trained on."""
    number, _ = locate(phases, step)
    return step in phases[number].skip_steps


def samples_of_step(
    seed: int,
    fingerprint: str,
    phases: Sequence[PhaseConfig],
    index_sizes: Sequence[Sequence[int]],
    step: int,
    weights: Sequence[float] | None = None,
) -> StepSamples:
    """Which samples step `step` (from 0) uses.

    Args:
        fingerprint: the data's.
        index_sizes: samples in each phase's indexes: one number a phase without weights, else one a source.
        weights: the sources'; their sum does not matter.

    Raises:
        ValueError: there is no such step.
    """
    phase, step_in_phase = locate(phases, step)
    first = _samples_in_phase(phases[phase], step_in_phase)
    batch_size = batch_size_of(phases[phase], step_in_phase)
    positions = np.arange(first, first + batch_size, dtype=np.int64)
    sizes = index_sizes[phase]
    if weights is None:
        assert len(sizes) == 1, sizes
        epochs, samples = _walk(positions, sizes[0], "order", seed, fingerprint, phase)
        return StepSamples(phase, np.zeros_like(positions), samples, epochs)
    assert len(sizes) == len(weights), (sizes, weights)
    sources, positions = _draw(positions, quotas(tuple(weights)), "mixture", seed, fingerprint, phase)
    starts = [0, *itertools.accumulate(sizes)]
    samples, epochs = np.empty_like(positions), np.empty_like(positions)
    for source in np.unique(sources).tolist():
        mine = sources == source
        epochs[mine], within = _walk(positions[mine], sizes[source], "source order", seed, fingerprint, phase, source)
        samples[mine] = starts[source] + within
    return StepSamples(phase, sources, samples, epochs)


@lru_cache(maxsize=8)
def quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """How many positions of a block each source has: by largest remainder, at least one, `MIXTURE_BLOCK` in all."""
    assert 0 < len(weights) <= MIXTURE_BLOCK and min(weights) > 0, weights
    exact = [Fraction(weight) for weight in weights]
    small: set[int] = set()
    while True:
        room, shared = MIXTURE_BLOCK - len(small), sum(w for i, w in enumerate(exact) if i not in small)
        ideal = [Fraction(1) if i in small else w * room / shared for i, w in enumerate(exact)]
        too_small = {i for i, share in enumerate(ideal) if share < 1}
        if not too_small:
            break
        small |= too_small
    whole = [math.floor(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (whole[i] - ideal[i], i))
    for i in by_remainder[: MIXTURE_BLOCK - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


def share_of_rank(batch_size: int, rank: int, world_size: int) -> slice:
    """The part of a step's samples that a rank takes; shares differ by one sample where they cannot be equal."""
    return slice(batch_size * rank // world_size, batch_size * (rank + 1) // world_size)


def micro_steps(batch_size: int, world_size: int, micro_batch: int) -> int:
    """Passes through the model a step takes: the same number on every rank, the largest share's."""
    largest_share = math.ceil(batch_size / world_size)
    return math.ceil(largest_share / micro_batch)


def _samples_in_phase(phase: PhaseConfig, steps: int) -> int:
    """Samples of the first `steps` steps of a phase."""
    used = 0
    for stage in phase.batch_ramp:
        used += min(steps, stage.steps) * stage.batch_size
        steps -= min(steps, stage.steps)
    return used + steps * phase.batch_size


def _walk(positions: Int64, size: int, *key: int | str) -> tuple[Int64, Int64]:
    """The epochs and samples of positions, ascending, in the stream of an index of `size` samples."""
    epochs, within = positions // size, positions % size
    samples = np.empty_like(positions)
    turns = np.flatnonzero(np.diff(epochs)) + 1
    for start, stop in itertools.pairwise([0, *turns.tolist(), len(positions)]):
        of_epoch = key_of(*key, int(epochs[start]))
        samples[start:stop] = permute(within[start:stop].astype(np.uint64), size, of_epoch).astype(np.int64)
    return epochs, samples


def _draw(positions: Int64, quota: tuple[int, ...], *key: int | str) -> tuple[Int64, Int64]:
    """The source that each position of a mixed stream draws from, and the position in that source's own stream."""
    blocks, within = np.divmod(positions, MIXTURE_BLOCK)
    sources, drawn = np.empty_like(positions), np.empty_like(positions)
    for block in np.unique(blocks).tolist():
        mine = blocks == block
        block_sources, ranks = _mixed_block(quota, key_of(*key, block))
        sources[mine], drawn[mine] = block_sources[within[mine]], ranks[within[mine]]
    return sources, blocks * np.asarray(quota, np.int64)[sources] + drawn


@lru_cache(maxsize=4)
def _mixed_block(quota: tuple[int, ...], key: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """For each position of a block its source, and how many positions before it in the block have the same one.

    A block is computed as a whole, because a source shall walk its stream in order: a step of it costs no more
    wherever it lies, and most steps find their block done.
    """
    slots = permute(np.arange(MIXTURE_BLOCK, dtype=np.uint64), MIXTURE_BLOCK, key)
    sources = np.repeat(np.arange(len(quota)), quota)[slots]
    by_source = np.argsort(sources, kind="stable")
    ranks = np.empty(MIXTURE_BLOCK, np.uint16)
    ranks[by_source] = np.concatenate([np.arange(share) for share in quota])
    return sources.astype(np.uint16), ranks
