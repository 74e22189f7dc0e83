"""How the batch for a step is chosen: `batch(step) = f(seed, data fingerprint, phases, step)` and nothing else.

Steps are 0-based. A step belongs to a phase and takes the next positions of that phase's endless stream, as many as
its batch size. No state is kept: to resume is to know one integer.

Without weights, position p of the stream is sample `permutation_e(p mod n)` of epoch `e = p // n`, where n is the
number of samples of the phase's index and each epoch has its own keyed permutation.

With weights, each source has an index and a stream of that kind of its own. The phase's stream is cut into blocks of
2^16 positions; each source has the same whole number of them in every block, in an order that a keyed permutation
decides anew for each block. The r-th of a source's q positions in block b is position `b * q + r` of its own stream,
so that a source completes an epoch before it begins the next.

With `data.shuffle_window_shards`, `multihop.pretrain.data.shard_windows` takes the place of the permutation of all
samples.

With `global_batch_tokens` what stands here of samples holds of batches of pairs, of which a step takes one:
`multihop.pretrain.data.token_batches` tells which pairs they are.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from multihop.common.counter_rng import key_of
from multihop.pretrain.config import PhaseConfig
from multihop.pretrain.data.mixture import Int64, draw, quotas, upcoming
from multihop.pretrain.data.permutation import permute
from multihop.pretrain.data.phases import batch_size_of, locate, samples_in_phase
from multihop.pretrain.data.shard_windows import ShardWindows


@dataclass(frozen=True)
class GlobalBatchIds:
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
    windows: Sequence[Sequence[ShardWindows]] | None = None,
) -> GlobalBatchIds:
    """The samples of the 0-based step `step`.

    Args:
        fingerprint: of the data.
        index_sizes: samples in each phase's indexes: one number per phase without weights, else one per source.
        weights: of the sources; they need not sum to 1.
        windows: of each phase's indexes, if samples are shuffled by windows of shards.

    Raises:
        UserError: the phases have no such step.
    """
    phase, positions = positions_of_step(phases, step)
    of_phase = None if windows is None else windows[phase]
    return samples_at(seed, fingerprint, phase, index_sizes[phase], positions, weights, of_phase)


def positions_of_step(phases: Sequence[PhaseConfig], step: int) -> tuple[int, Int64]:
    """The phase of a step, and its positions in the phase's stream; raises as `samples_of_step`."""
    phase, step_in_phase = locate(phases, step)
    first = samples_in_phase(phases[phase], step_in_phase)
    return phase, np.arange(first, first + batch_size_of(phases[phase], step_in_phase), dtype=np.int64)


def samples_at(
    seed: int,
    fingerprint: str,
    phase: int,
    sizes: Sequence[int],
    positions: Int64,
    weights: Sequence[float] | None = None,
    windows: Sequence[ShardWindows] | None = None,
) -> GlobalBatchIds:
    """The samples at some positions, ascending, of the stream of phase number `phase`.

    Args:
        sizes: samples in the phase's indexes: one number without weights, else one per source.
    """
    starts = [0, *itertools.accumulate(sizes)]
    sources, samples, epochs = (np.empty_like(positions) for _ in range(3))
    for part in _parts(seed, fingerprint, phase, sizes, positions, weights):
        if windows is None:
            size = sizes[part.source]
            found = permute(part.within.astype(np.uint64), size, key_of(*part.key)).astype(np.int64)
        else:
            found = windows[part.source].samples(part.within, *part.key)
        sources[part.at], samples[part.at], epochs[part.at] = part.source, starts[part.source] + found, part.epoch
    return GlobalBatchIds(phase, sources, samples, epochs)


def shards_at(
    seed: int,
    fingerprint: str,
    phase: int,
    sizes: Sequence[int],
    positions: Int64,
    weights: Sequence[float] | None,
    windows: Sequence[ShardWindows],
) -> tuple[list[set[int]], list[set[int]]]:
    """Of each of a phase's indexes, the shards of the windows at positions of its stream, and of the next windows.

    The arguments are those of `samples_at`, the positions consecutive ones. An index that none of them draws from is in
    a window all the same.
    """
    now: list[set[int]] = []
    then: list[set[int]] = []
    for source, (own, key) in enumerate(_own_positions(seed, fingerprint, phase, positions, weights)):
        size, of_index, end = sizes[source], windows[source], 0
        now.append(set())
        for part in _by_epoch(source, own, own, size, key):
            shards, within = of_index.shards(part.within, *part.key)
            now[-1] |= shards
            end = part.epoch * size + within
        (part,) = _by_epoch(source, np.array([0]), np.array([end]), size, key)
        then.append(of_index.shards(part.within, *part.key)[0])
    return now, then


def _own_positions(
    seed: int, fingerprint: str, phase: int, positions: Int64, weights: Sequence[float] | None
) -> Iterator[tuple[Int64, tuple[int | str, ...]]]:
    """Of each index its own stream's positions, the next one if there is none, and the key of its orders."""
    if weights is None:
        yield positions, ("order", seed, fingerprint, phase)
        return
    first, stop = int(positions[0]), int(positions[-1]) + 1
    begins, ends = (upcoming(at, quotas(tuple(weights)), "mixture", seed, fingerprint, phase) for at in (first, stop))
    for source, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        yield np.arange(begin, max(begin + 1, end)), ("source order", seed, fingerprint, phase, source)


@dataclass(frozen=True)
class _Part:
    """Some of the positions that were asked for: those of one epoch of one source."""

    source: int
    epoch: int
    at: Int64
    """Which of the positions they are."""
    within: Int64
    """Their positions within the epoch, ascending."""
    key: tuple[int | str, ...]
    """Of this epoch's order."""


def _parts(
    seed: int, fingerprint: str, phase: int, sizes: Sequence[int], positions: Int64, weights: Sequence[float] | None
) -> Iterator[_Part]:
    every = np.arange(len(positions))
    if weights is None:
        assert len(sizes) == 1, sizes
        key: tuple[int | str, ...] = ("order", seed, fingerprint, phase)
        yield from _by_epoch(0, every, positions, sizes[0], key)
        return
    assert len(sizes) == len(weights), (sizes, weights)
    sources, positions = draw(positions, quotas(tuple(weights)), "mixture", seed, fingerprint, phase)
    for source in np.unique(sources).tolist():
        mine = every[sources == source]
        yield from _by_epoch(
            source, mine, positions[mine], sizes[source], ("source order", seed, fingerprint, phase, source)
        )


def _by_epoch(source: int, at: Int64, positions: Int64, size: int, key: tuple[int | str, ...]) -> Iterator[_Part]:
    epochs, within = np.divmod(positions, size)
    turns = np.flatnonzero(np.diff(epochs)) + 1
    for start, stop in itertools.pairwise([0, *turns.tolist(), len(positions)]):
        if start < stop:
            epoch = int(epochs[start])
            yield _Part(source, epoch, at[start:stop], within[start:stop], (*key, epoch))
