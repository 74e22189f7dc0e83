"""The batch of a step: the arrays that a rank feeds to its model. `order` chooses the samples."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64, key_of, permute, random_bits
from multihop.data_prep.dataset.manifest import read_token_counts
from multihop.data_prep.dataset.shards import Documents, TokenDataset, open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.index import SampleIndex, index_rows, open_index, sources_of
from multihop.pretrain.data.order import GlobalBatchIds, SampleOrder
from multihop.pretrain.data.phases import micro_steps, share_of_rank
from multihop.pretrain.data.shard_requests import ShardRequests, await_shard
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.objective import objective_of


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of an optimizer step, or of the held-out samples."""

    step: int
    """0-based; -1: the held-out samples."""
    batch_size: int
    """Samples over all ranks."""
    samples: int
    """Samples of this rank."""
    micro_batches: list[Batch]
    """The same number on every rank. A rank that has fewer samples fills up with borrowed inputs and `counts` of 0."""
    counts: dict[str, int]
    """This rank's part of the divisors of the losses: the sum over its micro-batches."""
    tokens: int


@dataclass(frozen=True)
class BatchBuilder:
    """Makes a rank's share of any step, in any order."""

    config: TrainingConfig
    data: TokenDataset
    order: SampleOrder
    heldout_index: SampleIndex
    token_counts: NDArray[np.int64]
    """int64 (V,): how often each token occurs in the training text."""
    rank: int
    world_size: int
    micro_batch_sizes: list[int]
    """Samples per micro-batch of each phase without `global_batch_tokens`; held-out samples use the first phase's."""
    shard_requests: ShardRequests | None
    """Requests shards that are fetched during training; None: all shards are on this node."""

    @classmethod
    def open(
        cls,
        config: TrainingConfig,
        data_folder: Path,
        index_folder: Path,
        rank: int,
        world_size: int,
        micro_batch_sizes: list[int],
        shard_request_dir: Path | None = None,
    ) -> "BatchBuilder":
        """Memory-map the prepared data and the indexes that `multihop.pretrain.data.index.build_indexes` wrote.

        Args:
            shard_request_dir: The run directory in which shards are requested, if they are fetched during training;
                None: all shards are on this node.
        """
        assert len(micro_batch_sizes) == len(config.phases), micro_batch_sizes
        data = open_dataset(data_folder, None if shard_request_dir is None else await_shard)
        counts = read_token_counts(data_folder, data.manifest)
        indexes = [
            [
                open_index(index_folder, data, "train", config.objective, phase.seq_len, source)
                for source in sources_of(config)
            ]
            for phase in config.phases
        ]
        order = SampleOrder(config, data.manifest.fingerprint, indexes, data.train.shard_starts)
        heldout = open_index(index_folder, data, "heldout", config.objective, config.phases[0].seq_len)
        requests = None
        if shard_request_dir is not None:
            files = [shard.file for shard in data.manifest.of_split("train")]
            requests = ShardRequests(shard_request_dir, order, files)
        return cls(config, data, order, heldout, counts, rank, world_size, micro_batch_sizes, requests)

    def request_shards(self, step: int) -> None:
        """Request the shards of the steps from `step` on, if they are fetched during training; call this first."""
        if self.shard_requests is not None:
            self.shard_requests.request_from(step)

    def step(self, step: int) -> RankBatch:
        """This rank's share of the 0-based step `step`. Waits for shards that `request_shards` asked for."""
        ids = self.order.samples_of_step(step)
        base = key_of("mask", self.config.seed, self.data.manifest.fingerprint, ids.phase)
        mask_count = self.config.objective.static_masks
        masks = ids.epochs if mask_count is None else ids.epochs % mask_count
        keys = random_bits(random_bits(base, masks.astype(np.uint64)), ids.samples.astype(np.uint64))
        return self._share(step, self.data.train, self.order.indexes[ids.phase], ids, keys)

    def heldout(self, parts: int = 1) -> RankBatch:
        """This rank's share of the held-out samples, or of the first of `parts` equal parts: the same samples and masks
        each time and in every run."""
        return self._heldout_share(self._heldout_samples(parts))

    def heldout_by_source(self) -> dict[int, RankBatch]:
        """This rank's shares of the held-out samples of each source, by its number in `data.sources`.

        A sample with documents of several sources is in none of them.
        """
        samples, objective = self._heldout_samples(), objective_of(self.config.objective)
        documents, seq_len = self.data.heldout, self.config.phases[0].seq_len
        zeros = np.zeros(len(samples), np.int64)
        rows = index_rows(self.config.objective, [self.heldout_index], zeros, samples.astype(np.int64), seq_len)
        by_source: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            spans = objective.spans(documents, row, seq_len, self.config.objective)
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
        zeros = np.zeros(len(samples), np.int64)
        ids = GlobalBatchIds(phase=0, sources=zeros, samples=samples.astype(np.int64), epochs=zeros)
        return self._share(-1, self.data.heldout, [self.heldout_index], ids, keys)

    def _micro_batch_size(self, ids: GlobalBatchIds, indexes: list[SampleIndex]) -> int:
        """Samples per micro-batch, the same on every rank."""
        phase = self.config.phases[ids.phase]
        if phase.global_batch_tokens is None:
            return self.micro_batch_sizes[ids.phase]
        rows = index_rows(self.config.objective, indexes, ids.sources, ids.samples, phase.seq_len)
        return (self.config.engine.micro_batch_tokens or phase.global_batch_tokens) // int(rows[:, 1:].max())

    def _share(
        self, step: int, documents: Documents, indexes: list[SampleIndex], ids: GlobalBatchIds, keys: UInt64
    ) -> RankBatch:
        batch_size = len(ids.samples)
        share = share_of_rank(batch_size, self.rank, self.world_size)
        seq_len, size = self.config.phases[ids.phase].seq_len, self._micro_batch_size(ids, indexes)
        batches = []
        for number in range(micro_steps(batch_size, self.world_size, size)):
            start = share.start + number * size
            stop = min(start + size, share.stop)
            part = slice(start, stop) if start < stop else slice(0, 1)
            batch = objective_of(self.config.objective).collate(
                documents,
                index_rows(self.config.objective, indexes, ids.sources[part], ids.samples[part], seq_len),
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
