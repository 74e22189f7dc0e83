"""How the batch for a step is chosen: `batch(step) = f(seed, data fingerprint, phases, step)` and nothing else.

Steps are 0-based. A step belongs to a phase and takes the next positions of that phase's endless stream, as many as
its batch size. There is no state: resuming takes one integer.

Without weights, position p of the stream is sample `permutation_e(p mod n)` of epoch `e = p // n`, where n is the
number of samples of the phase's index and each epoch has its own keyed permutation.

With weights, each source has a separate index and stream of this kind. The phase's stream is cut into blocks of 2^16
positions; each source has the same number of them in every block, in an order that a keyed permutation decides for each
block. The r-th of a source's q positions in block b is position `b * q + r` of the source's
stream, so that a source completes an epoch before it begins the next.

With `data.shuffle_window_shards`, `multihop.pretrain.data.shard_windows` takes the place of the permutation of all
samples.

With `global_batch_tokens`, read "batch of pairs" for "sample" above: a step takes one batch, whose pairs
`multihop.pretrain.data.token_batches` determines.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of, permute
from multihop.pretrain.config import PhaseConfig, TrainingConfig
from multihop.pretrain.data.index import SampleIndex, source_weights
from multihop.pretrain.data.phases import batch_size_of, locate, samples_before, samples_in_phase
from multihop.pretrain.data.shard_windows import IndexShards, ShardWindows, shards_of_index
from multihop.pretrain.data.token_batches import TokenBatches

Int64 = NDArray[np.int64]
MIXTURE_BLOCK = 2**16
"""Number of positions within which the weights hold exactly; also the maximum number of sources."""


@dataclass(frozen=True)
class GlobalBatchIds:
    """The samples of one optimizer step, in the order in which they are divided among the ranks."""

    phase: int
    sources: Int64
    """int64 (batch_size,): which of the phase's indexes each sample is in; 0 without weights."""
    samples: Int64
    """int64 (batch_size,): positions in the phase's indexes, numbered as if the sources' indexes were concatenated."""
    epochs: Int64
    """int64 (batch_size,): how many times each sample was used before, which keys its mask."""


@dataclass(frozen=True)
class SampleOrder:
    """Determines the samples that each step of a run uses, and counts them."""

    config: TrainingConfig
    fingerprint: str
    """The data's fingerprint."""
    indexes: list[list[SampleIndex]]
    """The training indexes of each phase: one, or one per source where sources have weights."""
    shard_starts: Sequence[int]
    """The first document of each training shard; the last is the number of documents."""

    def samples_of_step(self, step: int) -> GlobalBatchIds:
        """The samples of the 0-based step `step`, over all ranks.

        Raises:
            UserError: The phases have no such step.
        """
        phase, positions = positions_of_step(self.config.phases, step)
        chosen = self.stream(phase).samples_at(positions)
        batches = self._token_batches[phase]
        if not batches:
            return chosen
        source, epoch = int(chosen.sources[0]), int(chosen.epochs[0])
        batch = int(chosen.samples[0]) - sum(map(len, batches[:source]))
        key = ("token batch", self.config.seed, self.fingerprint, phase, source, epoch)
        first = sum(index.size for index in self.indexes[phase][:source])
        pairs = first + batches[source].pairs(batch, *key)
        return GlobalBatchIds(phase, np.full_like(pairs, source), pairs, np.full_like(pairs, epoch))

    def samples_before(self, step: int) -> int:
        """The number of samples that the first `step` steps consume, skipped steps included.

        Raises:
            UserError: The phases have fewer steps.
        """
        used = samples_before(self.config.phases, step)
        for number, phase in enumerate(self.config.phases):
            steps = min(step, phase.steps)
            if self._token_batches[number]:
                used += self._pairs_before(number, steps) - samples_in_phase(phase, steps)
            step -= steps
        return used

    def stream(self, phase: int) -> "PhaseStream":
        """The stream of phase number `phase`: of samples, or of batches of pairs with `global_batch_tokens`."""
        windows = None if self.shard_windows is None else self.shard_windows[phase]
        weights = source_weights(self.config)
        return PhaseStream(self.config.seed, self.fingerprint, phase, self._sizes[phase], weights, windows)

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """The number of samples, or of batches of pairs, in each of a phase's indexes, for each phase."""
        return [
            [len(part) for part in batches] or [index.size for index in indexes]
            for batches, indexes in zip(self._token_batches, self.indexes, strict=True)
        ]

    @cached_property
    def index_shards(self) -> list[list[IndexShards]]:
        """The shards that contain each of `indexes`."""
        return [
            [shards_of_index(self.config.objective, index, self.shard_starts, phase.seq_len) for index in indexes]
            for phase, indexes in zip(self.config.phases, self.indexes, strict=True)
        ]

    @cached_property
    def shard_windows(self) -> list[list[ShardWindows]] | None:
        """The windows of each of `indexes`; None: samples are not shuffled by windows."""
        size = self.config.data.shuffle_window_shards if self.config.data else None
        if size is None:
            return None
        return [[ShardWindows(each.first_samples, size) for each in phase] for phase in self.index_shards]

    @cached_property
    def _token_batches(self) -> list[list[TokenBatches]]:
        """The batches of each of `indexes`; an empty list for a phase without `global_batch_tokens`."""
        return [
            [TokenBatches(index.rows[:, 1:].max(axis=1), phase.global_batch_tokens) for index in indexes]
            if phase.global_batch_tokens is not None
            else []
            for phase, indexes in zip(self.config.phases, self.indexes, strict=True)
        ]

    def _pairs_before(self, phase: int, steps: int) -> int:
        """The number of pairs in the first `steps` steps of a phase with `global_batch_tokens`: those of complete
        epochs, and those of the batches that were used of each source's last epoch."""
        stream, pairs = self.stream(phase), 0
        used = stream.positions_in_sources(steps).tolist()
        for source, batches in enumerate(self._token_batches[phase]):
            epochs, rest = divmod(used[source], len(batches))
            key = key_of(*stream.epoch_key(source, epochs))
            last_batches = permute(np.arange(rest, dtype=np.uint64), len(batches), key).astype(np.int64)
            pairs += epochs * self.indexes[phase][source].size + int(batches.sizes(last_batches).sum())
        return pairs


@dataclass(frozen=True)
class EpochPart:
    """Positions of a stream that are all in one epoch of one source."""

    source: int
    epoch: int
    indexes: Int64
    """Indexes of these positions in the array that was split."""
    within: Int64
    """These positions relative to the start of the epoch, ascending."""
    key: tuple[int | str, ...]
    """The key of this epoch's order."""


@dataclass(frozen=True)
class PhaseStream:
    """The endless stream of samples of one phase."""

    seed: int
    fingerprint: str
    """The data's fingerprint."""
    phase: int
    """The phase's number."""
    sizes: Sequence[int]
    """Number of samples in each of the phase's indexes: one index without weights, else one per source."""
    weights: Sequence[float] | None = None
    """The sources' weights; they need not sum to 1."""
    windows: Sequence[ShardWindows] | None = None
    """The windows of the phase's indexes; None: samples are not shuffled by windows of shards."""

    def samples_at(self, positions: Int64) -> GlobalBatchIds:
        """The samples at some positions of the stream, which are ascending."""
        starts = [0, *itertools.accumulate(self.sizes)]
        sources, samples, epochs = (np.empty_like(positions) for _ in range(3))
        for part in self._parts(positions):
            if self.windows is None:
                size = self.sizes[part.source]
                shuffled = permute(part.within.astype(np.uint64), size, key_of(*part.key)).astype(np.int64)
            else:
                shuffled = self.windows[part.source].samples(part.within, *part.key)
            sources[part.indexes], samples[part.indexes] = part.source, starts[part.source] + shuffled
            epochs[part.indexes] = part.epoch
        return GlobalBatchIds(self.phase, sources, samples, epochs)

    def positions_in_sources(self, position: int) -> Int64:
        """int64 (sources,): the position in each source's stream that is drawn next at a position of this stream."""
        if self.weights is None:
            return np.array([position], np.int64)
        return next_positions(position, quotas(tuple(self.weights)), *self._mixture_key)

    def split_by_epoch(self, source: int, indexes: Int64, positions: Int64) -> Iterator[EpochPart]:
        """Split positions of a source's stream, which are ascending, by epoch.

        Args:
            indexes: the indexes of the positions in the array that they come from.
        """
        epochs, within = np.divmod(positions, self.sizes[source])
        epoch_starts = np.flatnonzero(np.diff(epochs)) + 1
        for start, stop in itertools.pairwise([0, *epoch_starts.tolist(), len(positions)]):
            if start < stop:
                epoch = int(epochs[start])
                key = self.epoch_key(source, epoch)
                yield EpochPart(source, epoch, indexes[start:stop], within[start:stop], key)

    def epoch_key(self, source: int, epoch: int) -> tuple[int | str, ...]:
        """The key of the order of an epoch of a source."""
        if self.weights is None:
            return ("order", self.seed, self.fingerprint, self.phase, epoch)
        return ("source order", self.seed, self.fingerprint, self.phase, source, epoch)

    @property
    def _mixture_key(self) -> tuple[int | str, ...]:
        return ("mixture", self.seed, self.fingerprint, self.phase)

    def _parts(self, positions: Int64) -> Iterator[EpochPart]:
        assert len(self.sizes) == (1 if self.weights is None else len(self.weights)), (self.sizes, self.weights)
        indexes = np.arange(len(positions))
        if self.weights is None:
            yield from self.split_by_epoch(0, indexes, positions)
            return
        sources, positions = draw_sources(positions, quotas(tuple(self.weights)), *self._mixture_key)
        for source in np.unique(sources).tolist():
            drawn = indexes[sources == source]
            yield from self.split_by_epoch(source, drawn, positions[drawn])


def positions_of_step(phases: Sequence[PhaseConfig], step: int) -> tuple[int, Int64]:
    """The phase of a step, and its positions in the phase's stream.

    Raises:
        UserError: The phases have no such step.
    """
    phase, step_in_phase = locate(phases, step)
    first = samples_in_phase(phases[phase], step_in_phase)
    return phase, np.arange(first, first + batch_size_of(phases[phase], step_in_phase), dtype=np.int64)


@lru_cache(maxsize=8)
def quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """The number of positions of each source in a block: by largest remainder, at least one, `MIXTURE_BLOCK` in all."""
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


def draw_sources(positions: Int64, quota: tuple[int, ...], *key: int | str) -> tuple[Int64, Int64]:
    """The source of each position of a mixed stream, and the position in that source's stream."""
    blocks, within = np.divmod(positions, MIXTURE_BLOCK)
    sources, drawn = np.empty_like(positions), np.empty_like(positions)
    for block in np.unique(blocks).tolist():
        in_block = blocks == block
        block_sources, ranks = _mixed_block(quota, key_of(*key, block))
        sources[in_block], drawn[in_block] = block_sources[within[in_block]], ranks[within[in_block]]
    return sources, blocks * np.asarray(quota, np.int64)[sources] + drawn


def next_positions(position: int, quota: tuple[int, ...], *key: int | str) -> Int64:
    """int64 (sources,): the position in each source's stream that is drawn next at a position of the mixed stream."""
    block, within = divmod(position, MIXTURE_BLOCK)
    sources, _ = _mixed_block(quota, key_of(*key, block))
    return block * np.asarray(quota, np.int64) + np.bincount(sources[:within], minlength=len(quota))


@lru_cache(maxsize=4)
def _mixed_block(quota: tuple[int, ...], key: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """For each position of a block its source, and the number of earlier positions in the block with the same source.

    A whole block is computed at once, because each source takes the positions of its stream in order; most steps find
    their block in the cache.
    """
    slots = permute(np.arange(MIXTURE_BLOCK, dtype=np.uint64), MIXTURE_BLOCK, key)
    sources = np.repeat(np.arange(len(quota)), quota)[slots]
    by_source = np.argsort(sources, kind="stable")
    ranks = np.empty(MIXTURE_BLOCK, np.uint16)
    ranks[by_source] = np.concatenate([np.arange(share) for share in quota])
    return sources.astype(np.uint16), ranks
