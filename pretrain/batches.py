"""From a step's number to the arrays that a rank feeds to its model."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from data_prep.shards import Documents, TokenDataset, open_dataset
from pretrain.config import TrainingConfig
from pretrain.keyed import UInt64, key_of, permute, random_bits
from pretrain.objectives import objective_of
from pretrain.objectives.batch import Batch
from pretrain.order import micro_steps, samples_of_step, share_of_rank
from pretrain.samples import open_index

T = TypeVar("T")


@dataclass(frozen=True)
class RankStep:
    """What one rank does in one optimizer step."""

    micro_batches: list[Batch]
    """As many as on every other rank. One without samples of its own has `counts` of 0 and borrowed inputs."""
    counts: dict[str, int]
    """Summed over the micro-batches: this rank's part of what the losses are divided by."""
    tokens: int


@dataclass(frozen=True)
class BatchMaker:
    """A rank's view of the law of order: any step's batch, at any time."""

    config: TrainingConfig
    data: TokenDataset
    train_indexes: list[NDArray[np.int64]]
    heldout_index: NDArray[np.int64]
    token_counts: NDArray[np.int64]
    """int64 (vocabulary,): how often each piece stands in the training text."""
    rank: int
    world_size: int

    @classmethod
    def open(
        cls, config: TrainingConfig, data_folder: Path, index_folder: Path, rank: int, world_size: int
    ) -> "BatchMaker":
        """Map the prepared data, and the indexes that `pretrain.samples.build_index` wrote."""
        data = open_dataset(data_folder)
        counts = np.load(data_folder / data.manifest.token_counts.file)
        train = [open_index(index_folder, data, "train", config.objective, phase.seq_len) for phase in config.phases]
        heldout = open_index(index_folder, data, "heldout", config.objective, config.phases[0].seq_len)
        return cls(config, data, train, heldout, counts, rank, world_size)

    def step(self, step: int) -> RankStep:
        """This rank's share of step `step` (from 0)."""
        config, rules = self.config, objective_of(self.config.objective)
        sizes = [
            rules.sample_count(index, phase.seq_len)
            for index, phase in zip(self.train_indexes, config.phases, strict=True)
        ]
        fingerprint = self.data.manifest.fingerprint
        chosen = samples_of_step(config.seed, fingerprint, config.phases, sizes, step)
        base = key_of("mask", config.seed, fingerprint, chosen.phase)
        keys = random_bits(random_bits(base, chosen.epochs.astype(np.uint64)), chosen.samples.astype(np.uint64))
        return self._share(
            self.data.train, self.train_indexes[chosen.phase], chosen.samples, keys, config.phases[chosen.phase].seq_len
        )

    def heldout(self) -> RankStep:
        """This rank's share of the held-out samples: the same samples and masks each time and in every run."""
        config, rules = self.config, objective_of(self.config.objective)
        seq_len = config.phases[0].seq_len
        size = rules.sample_count(self.heldout_index, seq_len)
        count = min(config.engine.heldout_samples, size)
        key = key_of("heldout order", self.data.manifest.fingerprint)
        spread = permute(np.arange(count, dtype=np.uint64), size, key)
        samples = spread.astype(np.int64)
        keys = random_bits(key_of("heldout", self.data.manifest.fingerprint), samples.astype(np.uint64))
        return self._share(self.data.heldout, self.heldout_index, samples, keys, seq_len)

    def _share(
        self,
        documents: Documents,
        index: NDArray[np.int64],
        samples: NDArray[np.int64],
        keys: UInt64,
        seq_len: int,
    ) -> RankStep:
        share = share_of_rank(len(samples), self.rank, self.world_size)
        size = self.config.engine.micro_batch
        batches = []
        for number in range(micro_steps(len(samples), self.world_size, size)):
            start = share.start + number * size
            part = slice(start, min(start + size, share.stop))
            mine = part.stop > part.start
            batch = objective_of(self.config.objective).assemble(
                documents,
                index,
                samples[part] if mine else samples[:1],
                keys[part] if mine else keys[:1],
                seq_len,
                self.data.manifest.tokenizer,
                self.config.objective.mask_rate,
            )
            if not mine:
                batch = Batch(batch.inputs, batch.targets[:0], dict.fromkeys(batch.counts, 0), 0)
            batches.append(batch)
        counts = {name: sum(batch.counts[name] for batch in batches) for name in batches[0].counts}
        return RankStep(batches, counts, sum(batch.tokens for batch in batches))


def prefetched(make: Callable[[int], T], steps: range) -> Iterator[T]:
    """`make(step)` for each step, each made by a thread while the one before it is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        coming = thread.submit(make, steps.start) if steps else None
        for step in steps:
            assert coming is not None
            ready = coming.result()
            coming = thread.submit(make, step + 1) if step + 1 < steps.stop else None
            yield ready
