"""From a step's number to the arrays that a rank feeds to its model."""

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.manifest import read_token_counts
from data_prep.shards import Documents, TokenDataset, open_dataset
from pretrain.config import TrainingConfig
from pretrain.keyed import UInt64, key_of, permute, random_bits
from pretrain.objectives import objective_of
from pretrain.objectives.batch import Batch
from pretrain.order import StepSamples, is_skipped, micro_steps, samples_of_step, share_of_rank
from pretrain.samples import SampleIndex, look_up, open_index, source_weights, sources_of

_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class RankStep:
    """What one rank does in one optimizer step, or on the held-out samples."""

    step: int
    """From 0; -1: the held-out samples."""
    batch_size: int
    """Samples over all ranks."""
    samples: int
    """This rank's part of them."""
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
    train_indexes: list[list[SampleIndex]]
    """Of each phase: one, or one a source where sources have weights."""
    heldout_index: SampleIndex
    token_counts: NDArray[np.int64]
    """int64 (vocabulary,): how often each piece stands in the training text."""
    rank: int
    world_size: int
    micro_batches: list[int]
    """Of each phase: how many samples go through the model at once. Held-out samples go as those of the first."""

    @classmethod
    def open(
        cls,
        config: TrainingConfig,
        data_folder: Path,
        index_folder: Path,
        rank: int,
        world_size: int,
        micro_batches: list[int],
    ) -> "BatchMaker":
        """Map the prepared data, and the indexes that `pretrain.samples.build_indexes` wrote."""
        assert len(micro_batches) == len(config.phases), micro_batches
        data = open_dataset(data_folder)
        counts = read_token_counts(data_folder, data.manifest)
        train = [
            [
                open_index(index_folder, data, "train", config.objective, phase.seq_len, source)
                for source in sources_of(config)
            ]
            for phase in config.phases
        ]
        heldout = open_index(index_folder, data, "heldout", config.objective, config.phases[0].seq_len)
        return cls(config, data, train, heldout, counts, rank, world_size, micro_batches)

    def choose(self, step: int) -> StepSamples:
        """The samples that all ranks together use in step `step` (from 0)."""
        sizes = [[index.size for index in indexes] for indexes in self.train_indexes]
        weights, fingerprint = source_weights(self.config), self.data.manifest.fingerprint
        return samples_of_step(self.config.seed, fingerprint, self.config.phases, sizes, step, weights)

    def step(self, step: int) -> RankStep:
        """This rank's share of step `step` (from 0)."""
        chosen = self.choose(step)
        base = key_of("mask", self.config.seed, self.data.manifest.fingerprint, chosen.phase)
        different = self.config.objective.static_masks
        masks = chosen.epochs if different is None else chosen.epochs % different
        keys = random_bits(random_bits(base, masks.astype(np.uint64)), chosen.samples.astype(np.uint64))
        return self._share(step, self.data.train, self.train_indexes[chosen.phase], chosen, keys)

    def heldout(self) -> RankStep:
        """This rank's share of the held-out samples: the same samples and masks each time and in every run."""
        size = self.heldout_index.size
        count = min(self.config.engine.heldout_samples, size)
        key = key_of("heldout order", self.data.manifest.fingerprint)
        spread = permute(np.arange(count, dtype=np.uint64), size, key)
        keys = random_bits(key_of("heldout", self.data.manifest.fingerprint), spread)
        once = np.zeros(count, np.int64)
        chosen = StepSamples(phase=0, sources=once, samples=spread.astype(np.int64), epochs=once)
        return self._share(-1, self.data.heldout, [self.heldout_index], chosen, keys)

    def _share(
        self, step: int, documents: Documents, indexes: list[SampleIndex], chosen: StepSamples, keys: UInt64
    ) -> RankStep:
        batch_size = len(chosen.samples)
        share = share_of_rank(batch_size, self.rank, self.world_size)
        seq_len, size = self.config.phases[chosen.phase].seq_len, self.micro_batches[chosen.phase]
        batches = []
        for number in range(micro_steps(batch_size, self.world_size, size)):
            start = share.start + number * size
            stop = min(start + size, share.stop)
            part = slice(start, stop) if start < stop else slice(0, 1)
            batch = objective_of(self.config.objective).assemble(
                documents,
                look_up(self.config.objective, indexes, chosen.sources[part], chosen.samples[part], seq_len),
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
        return RankStep(step, batch_size, share.stop - share.start, batches, counts, tokens)


def stream(maker: BatchMaker, steps: Iterable[int], data_workers: int) -> Iterator[RankStep]:
    """This rank's share of each of `steps` that the recipe does not skip, in their order.

    Args:
        data_workers: processes that make them ahead of time, two each; 0: each is made here when it is asked for.

    Raises:
        what `BatchMaker.step` raises, of the same type, wherever it ran; RuntimeError: a process was killed.
    """
    from torch import Generator
    from torch.utils.data import DataLoader

    loader: DataLoader[RankStep] = DataLoader(
        _Steps(maker),  # type: ignore[arg-type]
        batch_size=None,
        sampler=(step for step in steps if not is_skipped(maker.config.phases, step)),
        num_workers=data_workers,
        collate_fn=_as_it_is,
        worker_init_fn=partial(_prepare_process, os.getpid()),
        multiprocessing_context="fork" if data_workers else None,
        generator=Generator(),  # of its own: the loader draws a seed, and the model's dropout shall not notice
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # its processes begin with what is blocked here
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Steps:
    maker: BatchMaker

    def __getitem__(self, step: int) -> RankStep:
        return self.maker.step(step)


def _as_it_is(step: Any) -> Any:
    return step


def _prepare_process(parent: int, number: int) -> None:
    """Die with the rank, and end only when the rank says so: a signal to a whole job shall let it finish its step.

    The signals are blocked since before the process began.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    Thread(target=_end_when_told, args=(parent,), daemon=True).start()


def _end_when_told(parent: int) -> None:
    while signal.sigwaitinfo(_ENDING).si_pid != parent:
        pass
    os._exit(0)
