"""From a step's number to the arrays that a rank feeds to its model; which samples they are is chosen in `order`."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64, key_of, random_bits
from multihop.data_prep.dataset.manifest import read_token_counts
from multihop.data_prep.dataset.shards import Documents, TokenDataset, open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.index import SampleIndex, index_rows, open_index, source_weights, sources_of
from multihop.pretrain.data.mixture import Int64
from multihop.pretrain.data.order import GlobalBatchIds, samples_at, samples_of_step
from multihop.pretrain.data.permutation import permute
from multihop.pretrain.data.phases import micro_steps, samples_before, samples_in_phase, share_of_rank
from multihop.pretrain.data.shard_requests import await_shard, request
from multihop.pretrain.data.shard_schedule import ShardSchedule
from multihop.pretrain.data.token_batches import TokenBatches
from multihop.pretrain.objectives import objective_of
from multihop.pretrain.objectives.batch import Batch


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of an optimizer step, or of the held-out samples."""

    step: int
    """0-based; -1: the held-out samples."""
    batch_size: int
    """Samples over all ranks."""
    samples: int
    """This rank's part of them."""
    micro_batches: list[Batch]
    """The same number on every rank. One without samples of its own has `counts` of 0 and borrowed inputs."""
    counts: dict[str, int]
    """Summed over the micro-batches: this rank's part of the counts that the losses are divided by."""
    tokens: int


@dataclass(frozen=True)
class BatchBuilder:
    """Makes a rank's share of any step, in any order."""

    config: TrainingConfig
    data: TokenDataset
    train_indexes: list[list[SampleIndex]]
    """Of each phase: one, or one per source where sources have weights."""
    heldout_index: SampleIndex
    token_counts: NDArray[np.int64]
    """int64 (vocabulary,): how often each token occurs in the training text."""
    rank: int
    world_size: int
    micro_batch_sizes: list[int]
    """Samples per micro-batch of each phase without `global_batch_tokens`; held-out samples use the first phase's."""
    arriving: Path | None = None
    """The run directory in which shards are asked for, where they are fetched while training goes on."""
    _counted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By phase with `global_batch_tokens`: a number of its steps, and the pairs of these."""
    _asked: list[int] = field(default_factory=list)
    """The shards that were asked for last."""

    @classmethod
    def open(
        cls,
        config: TrainingConfig,
        data_folder: Path,
        index_folder: Path,
        rank: int,
        world_size: int,
        micro_batch_sizes: list[int],
        arriving: Path | None = None,
    ) -> "BatchBuilder":
        """Memory-map the prepared data and the indexes that `multihop.pretrain.data.index.build_indexes` wrote.

        Args:
            arriving: as the field; None: all shards are there.
        """
        assert len(micro_batch_sizes) == len(config.phases), micro_batch_sizes
        data = open_dataset(data_folder, None if arriving is None else await_shard)
        counts = read_token_counts(data_folder, data.manifest)
        train = [
            [
                open_index(index_folder, data, "train", config.objective, phase.seq_len, source)
                for source in sources_of(config)
            ]
            for phase in config.phases
        ]
        heldout = open_index(index_folder, data, "heldout", config.objective, config.phases[0].seq_len)
        return cls(config, data, train, heldout, counts, rank, world_size, micro_batch_sizes, arriving)

    def choose(self, step: int) -> GlobalBatchIds:
        """The samples of the 0-based step `step`, over all ranks."""
        phases, fingerprint = self.config.phases, self.data.manifest.fingerprint
        weights, windows = source_weights(self.config), self._schedule.windows
        chosen = samples_of_step(self.config.seed, fingerprint, phases, self._sizes, step, weights, windows)
        batches = self._token_batches[chosen.phase]
        if not batches:
            return chosen
        source, epoch = int(chosen.sources[0]), int(chosen.epochs[0])
        batch = int(chosen.samples[0]) - sum(map(len, batches[:source]))
        key = ("token batch", self.config.seed, fingerprint, chosen.phase, source, epoch)
        before = sum(index.size for index in self.train_indexes[chosen.phase][:source])
        pairs = before + batches[source].pairs(batch, *key)
        return GlobalBatchIds(chosen.phase, np.full_like(pairs, source), pairs, np.full_like(pairs, epoch))

    def samples_before(self, step: int) -> int:
        """The number of samples that the first `step` steps consume, skipped steps included."""
        used = samples_before(self.config.phases, step)
        for number, phase in enumerate(self.config.phases):
            steps = min(step, phase.steps)
            if self._token_batches[number]:
                used += self._pairs_before(number, steps) - samples_in_phase(phase, steps)
            step -= steps
        return used

    def step(self, step: int) -> RankBatch:
        """This rank's share of the 0-based step `step`."""
        if self.arriving is not None:
            self._request_shards(self.arriving, step)
        chosen = self.choose(step)
        base = key_of("mask", self.config.seed, self.data.manifest.fingerprint, chosen.phase)
        different = self.config.objective.static_masks
        masks = chosen.epochs if different is None else chosen.epochs % different
        keys = random_bits(random_bits(base, masks.astype(np.uint64)), chosen.samples.astype(np.uint64))
        return self._share(step, self.data.train, self.train_indexes[chosen.phase], chosen, keys)

    def heldout(self, parts: int = 1) -> RankBatch:
        """This rank's share of the held-out samples, or of the first of `parts` equal parts of them: the same samples
        and masks each time and in every run."""
        return self._heldout_share(self._heldout_samples(parts))

    def heldout_by_source(self) -> dict[int, RankBatch]:
        """This rank's shares of the held-out samples of each source, by its number in `data.sources`.

        A sample with documents of several sources is in none of them.
        """
        samples, rules = self._heldout_samples(), objective_of(self.config.objective)
        documents, seq_len = self.data.heldout, self.config.phases[0].seq_len
        once = np.zeros(len(samples), np.int64)
        rows = index_rows(self.config.objective, [self.heldout_index], once, samples.astype(np.int64), seq_len)
        by_source: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            spans = rules.spans(documents, row, seq_len, self.config.objective)
            sources = {documents.source(document) for document, _, _ in spans}
            if len(sources) == 1:
                by_source.setdefault(sources.pop(), []).append(number)
        return {source: self._heldout_share(samples[numbers]) for source, numbers in sorted(by_source.items())}

    def _heldout_samples(self, parts: int = 1) -> UInt64:
        size = self.heldout_index.size
        count = -(-min(self.config.engine.heldout_samples, size) // parts)
        key = key_of("heldout order", self.data.manifest.fingerprint)
        return permute(np.arange(count, dtype=np.uint64), size, key)

    def _heldout_share(self, samples: UInt64) -> RankBatch:
        keys = random_bits(key_of("heldout", self.data.manifest.fingerprint), samples)
        once = np.zeros(len(samples), np.int64)
        chosen = GlobalBatchIds(phase=0, sources=once, samples=samples.astype(np.int64), epochs=once)
        return self._share(-1, self.data.heldout, [self.heldout_index], chosen, keys)

    @cached_property
    def _token_batches(self) -> list[list[TokenBatches]]:
        """As `train_indexes`; empty for a phase without `global_batch_tokens`."""
        return [
            [TokenBatches(index.rows[:, 1:].max(axis=1), phase.global_batch_tokens) for index in indexes]
            if phase.global_batch_tokens is not None
            else []
            for phase, indexes in zip(self.config.phases, self.train_indexes, strict=True)
        ]

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """Of each phase's indexes: samples, or batches of pairs."""
        return [
            [len(part) for part in batches] or [index.size for index in indexes]
            for batches, indexes in zip(self._token_batches, self.train_indexes, strict=True)
        ]

    @cached_property
    def _schedule(self) -> ShardSchedule:
        fingerprint, starts = self.data.manifest.fingerprint, self.data.train.shard_starts
        return ShardSchedule(self.config, fingerprint, self.train_indexes, starts)

    def _request_shards(self, run_dir: Path, step: int) -> None:
        """Ask for what the steps from `step` on need."""
        needed = self._schedule.needed_from(step)
        if needed == self._asked:
            return
        # Other ranks of this node, and other processes of this rank, may be some steps behind.
        behind = max(0, step - 2 * self.config.engine.data_workers - 2)
        kept = dict.fromkeys([*needed, *self._schedule.needed_from(behind)])
        shards = self.data.manifest.of_split("train")
        request(run_dir, [shards[number].file for number in kept])
        self._asked[:] = needed

    def _pairs_before(self, phase: int, steps: int) -> int:
        """Pairs of the first `steps` steps of a phase with `global_batch_tokens`; counts on from the last call."""
        first, pairs = self._counted.get(phase, (0, 0))
        if first > steps:
            first, pairs = 0, 0
        if first == steps:
            return pairs
        positions: Int64 = np.arange(first, steps, dtype=np.int64)
        fingerprint, weights = self.data.manifest.fingerprint, source_weights(self.config)
        chosen = samples_at(self.config.seed, fingerprint, phase, self._sizes[phase], positions, weights)
        before = 0
        for source, batches in enumerate(self._token_batches[phase]):
            pairs += int(batches.sizes(chosen.samples[chosen.sources == source] - before).sum())
            before += len(batches)
        self._counted[phase] = steps, pairs
        return pairs

    def _micro_batch_size(self, chosen: GlobalBatchIds, indexes: list[SampleIndex]) -> int:
        """Samples per micro-batch: the same on every rank."""
        phase = self.config.phases[chosen.phase]
        if phase.global_batch_tokens is None:
            return self.micro_batch_sizes[chosen.phase]
        rows = index_rows(self.config.objective, indexes, chosen.sources, chosen.samples, phase.seq_len)
        return (self.config.engine.micro_batch_tokens or phase.global_batch_tokens) // int(rows[:, 1:].max())

    def _share(
        self, step: int, documents: Documents, indexes: list[SampleIndex], chosen: GlobalBatchIds, keys: UInt64
    ) -> RankBatch:
        batch_size = len(chosen.samples)
        share = share_of_rank(batch_size, self.rank, self.world_size)
        seq_len, size = self.config.phases[chosen.phase].seq_len, self._micro_batch_size(chosen, indexes)
        batches = []
        for number in range(micro_steps(batch_size, self.world_size, size)):
            start = share.start + number * size
            stop = min(start + size, share.stop)
            part = slice(start, stop) if start < stop else slice(0, 1)
            batch = objective_of(self.config.objective).assemble(
                documents,
                index_rows(self.config.objective, indexes, chosen.sources[part], chosen.samples[part], seq_len),
                keys[part],
                seq_len,
                self.data.manifest.tokenizer,
                self.config.objective,
            )
            if start >= stop:
                batch = Batch(batch.inputs, batch.targets[:0], dict.fromkeys(batch.counts, 0), 0)
            batches.append(batch)
        counts = {name: sum(batch.counts[name] for batch in batches) for name in batches[0].counts}
        tokens = sum(batch.tokens for batch in batches)
        return RankBatch(step, batch_size, share.stop - share.start, batches, counts, tokens)
