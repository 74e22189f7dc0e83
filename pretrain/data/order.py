"""How the batch for a step is chosen: `batch(step) = f(seed, data fingerprint, phases, step)` and nothing else.

Steps are 0-based. A step belongs to a phase and takes the next positions of that phase's endless stream, as many as
its batch size. No state is kept: to resume is to know one integer.

Without weights, position p of the stream is sample `permutation_e(p mod n)` of epoch `e = p // n`, where n is the
number of samples of the phase's index and each epoch has its own keyed permutation.

With weights, each source has an index and a stream of that kind of its own. The phase's stream is cut into blocks of
2^16 positions; each source has the same whole number of them in every block, in an order that a keyed permutation
decides anew for each block. The r-th of a source's q positions in block b is position `b * q + r` of its own stream,
so that a source completes an epoch before it begins the next.

With `batch_tokens` what stands here of samples holds of batches of pairs, of which a step takes one:
`pretrain.data.token_batches` tells which pairs they are.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.keyed import key_of
from pretrain.config import PhaseConfig
from pretrain.data.mixture import Int64, draw, quotas
from pretrain.data.permutation import permute
from pretrain.data.phases import batch_size_of, locate, samples_in_phase


@dataclass(frozen=True)
class StepSamples:
    """The samples of one optimizer step, in the order in which ranks share them out."""

    phase: int
    sources: Int64
    """int64 (batch_size,): which of the phase's indexes each sample is in; 0 without weights."""
    samples: Int64
    """int64 (batch_size,): positions in the phase's indexes, numbered as if the sources' indexes were concatenated."""
    epochs: Int64
    """int64 (batch_size,): how often each sample was used before, which keys its mask."""


def samples_of_step(
    seed: int,
    fingerprint: str,
    phases: Sequence[PhaseConfig],
    index_sizes: Sequence[Sequence[int]],
    step: int,
    weights: Sequence[float] | None = None,
) -> StepSamples:
    """The samples of the 0-based step `step`.

    Args:
        fingerprint: of the data.
        index_sizes: samples in each phase's indexes: one number per phase without weights, else one per source.
        weights: of the sources; they need not sum to 1.

    Raises:
        ValueError: the phases have no such step.
    """
    phase, step_in_phase = locate(phases, step)
    first = samples_in_phase(phases[phase], step_in_phase)
    batch_size = batch_size_of(phases[phase], step_in_phase)
    positions = np.arange(first, first + batch_size, dtype=np.int64)
    return samples_at(seed, fingerprint, phase, index_sizes[phase], positions, weights)


def samples_at(
    seed: int,
    fingerprint: str,
    phase: int,
    sizes: Sequence[int],
    positions: Int64,
    weights: Sequence[float] | None = None,
) -> StepSamples:
    """The samples at some positions, ascending, of the stream of phase number `phase`.

    Args:
        sizes: samples in the phase's indexes: one number without weights, else one per source.
    """
    if weights is None:
        assert len(sizes) == 1, sizes
        epochs, samples = _walk(positions, sizes[0], "order", seed, fingerprint, phase)
        return StepSamples(phase, np.zeros_like(positions), samples, epochs)
    assert len(sizes) == len(weights), (sizes, weights)
    sources, positions = draw(positions, quotas(tuple(weights)), "mixture", seed, fingerprint, phase)
    starts = [0, *itertools.accumulate(sizes)]
    samples, epochs = np.empty_like(positions), np.empty_like(positions)
    for source in np.unique(sources).tolist():
        mine = sources == source
        epochs[mine], within = _walk(positions[mine], sizes[source], "source order", seed, fingerprint, phase, source)
        samples[mine] = starts[source] + within
    return StepSamples(phase, sources, samples, epochs)


def _walk(positions: Int64, size: int, *key: int | str) -> tuple[Int64, Int64]:
    """The epochs and samples of positions, ascending, in the stream of an index of `size` samples."""
    epochs, within = positions // size, positions % size
    samples = np.empty_like(positions)
    turns = np.flatnonzero(np.diff(epochs)) + 1
    for start, stop in itertools.pairwise([0, *turns.tolist(), len(positions)]):
        of_epoch = key_of(*key, int(epochs[start]))
        samples[start:stop] = permute(within[start:stop].astype(np.uint64), size, of_epoch).astype(np.int64)
    return epochs, samples
