"""The largest micro-batch that fits into the memory of a GPU, for a phase of a recipe and a number of ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from multihop.pretrain.config import PhaseConfig, TrainingConfig
from multihop.pretrain.device_type import DeviceType
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.prepared_batch import count_heldout, prepared_batch
from multihop.pretrain.plan.rank_trace import RankTrace, trace_rank
from multihop.pretrain.run.throughput import step_flops

_TRACED_TOKENS = 4096
"""Tokens of the smaller of the two micro-batches whose memory is extrapolated."""
_MAX_TRACED_TOKENS = 2**18
"""Up to this size a rank's whole share of a step is tried first."""
_MICRO_BATCHES = 2
"""Most micro-batches of a traced step: the gradients of the first are there while the second is computed."""


@dataclass(frozen=True)
class Vocabularies:
    """Sizes of the vocabularies of a data set."""

    output: int
    """Of what the model predicts."""
    source: int | None = None
    """Of the sources of pairs, if it is another."""


@dataclass(frozen=True)
class Fit:
    """The micro-batch of a phase on each rank."""

    micro_batch_size: int
    """Samples; 0: not one fits."""
    micro_batches: int
    """Micro-batches of a step."""
    batch: Batch
    """The micro-batch, or a sample alone if not one fits; of prepared data the largest of several."""
    samples: int
    """Samples of that micro-batch."""
    step_tokens: float
    """Tokens of a step on a rank, of prepared data on average."""
    trace: RankTrace
    """A step with this micro-batch."""


def global_samples(phase: PhaseConfig) -> int:
    """Samples of a step over all ranks; of steps by tokens, pairs whose sides are as long as the phase allows."""
    tokens = phase.global_batch_tokens
    return phase.global_batch_size if tokens is None else max(1, tokens // phase.seq_len)


def seconds_of_steps(phase: PhaseConfig, step_s: Callable[[float], float]) -> float:
    """Seconds of all steps of a phase.

    Args:
        step_s: seconds of a step with a share of the phase's samples.
    """
    size = global_samples(phase)
    ramp = sum(each.steps * step_s(each.global_batch_size / size) for each in phase.batch_ramp)
    return ramp + (phase.steps - sum(each.steps for each in phase.batch_ramp)) * step_s(1.0)


def prepared_paths(prepared: Sequence[str] | None) -> tuple[Path, Path] | None:
    """The directories of prepared data and of its indexes, of a request in JSON."""
    return None if prepared is None else (Path(prepared[0]), Path(prepared[1]))


@dataclass(frozen=True)
class RankPlan:
    """A phase of a run on a number of ranks."""

    config: TrainingConfig
    phase: int
    world_size: int
    vocabularies: Vocabularies
    device: DeviceType = "cuda"
    prepared: tuple[Path, Path] | None = None
    """Directories of prepared data and its indexes; None: samples are assumed to be as long as the phase allows."""
    shard_request_dir: Path | None = None
    """As for `BatchBuilder.open`."""

    @cached_property
    def share(self) -> int:
        """Samples of a step on each rank, at most."""
        return math.ceil(global_samples(self.config.phases[self.phase]) / self.world_size)

    @cached_property
    def heldout_samples(self) -> int:
        """Samples of a held-out evaluation over all ranks."""
        asked = self.config.engine.heldout_samples
        return asked if self.prepared is None else min(asked, count_heldout(self.config, *self.prepared))

    def trace(self, batch: Batch, samples: int) -> RankTrace:
        """A step with a micro-batch of a number of samples."""
        count = 1 if samples >= self.share else _MICRO_BATCHES
        sizes = self.vocabularies.output, self.vocabularies.source
        return trace_rank(self.config, *sizes, [batch] * count, samples, self.world_size, self.device)

    def bytes_of(self, trace: RankTrace) -> int:
        """The largest bytes of a step; what is offloaded stays in the same memory on a CPU."""
        return trace.peak if self.device == "cuda" else max(sum(parts.values()) for parts in trace.peaks.values())

    def micro_batch(self, samples: int) -> tuple[Batch, float]:
        """A micro-batch of a number of samples, and the mean number of tokens of such ones."""
        if self.prepared is not None:
            directories = (*self.prepared, self.shard_request_dir)
            return prepared_batch(self.config, self.phase, samples, self.world_size, *directories)
        batch = assumed_batch(self.config, self.phase, samples, self.vocabularies.output)
        return batch, float(batch.tokens)

    def step_tokens(self, samples: int, mean_tokens: float) -> float:
        """Tokens of a step on a rank, of micro-batches of this mean number of tokens."""
        # The last one of a step may have fewer samples; those of prepared data were counted with it.
        return mean_tokens * (self.share / samples if self.prepared is None else math.ceil(self.share / samples))

    def tokens_and_flops(self, step_tokens: float, batch: Batch) -> tuple[float, float]:
        """Tokens and floating-point operations of a step of all ranks.

        Args:
            step_tokens: tokens of a step on a rank.
            batch: a micro-batch, whose operations for a token are those of all.
        """
        tokens = step_tokens / self.share * global_samples(self.config.phases[self.phase])
        flops = step_flops(self.config.model, self.vocabularies.output, batch) / batch.tokens * tokens
        return tokens, flops

    def largest(self, limit: float) -> Fit:
        """The largest micro-batch whose memory is within a limit in bytes; the recipe's if it sets a number."""
        engine, phase = self.config.engine, self.config.phases[self.phase]
        if phase.global_batch_tokens is not None:
            tokens = engine.micro_batch_tokens or phase.global_batch_tokens
            return self._fit(min(max(1, tokens // phase.seq_len), self.share), limit)
        if isinstance(engine.micro_batch_size, int):
            return self._fit(min(engine.micro_batch_size, self.share), limit)
        if self.share * phase.seq_len <= _MAX_TRACED_TOKENS:
            whole = self._fit(self.share, limit)
            if whole.micro_batch_size or self.share == 1:
                return whole
        small = max(1, min(_TRACED_TOKENS // phase.seq_len, (self.share - 1) // 2))
        few, many = ((samples, self._bytes_with(samples)) for samples in (small, 2 * small))
        fit = self._fit(self._extrapolate(few, many, limit), limit)
        while not fit.micro_batch_size and fit.samples > 1:
            fit = self._fit(min(fit.samples - 1, math.ceil(self.share / (fit.micro_batches + 1))), limit)
        before = few if fit.samples == many[0] else many
        while fit.micro_batch_size:  # memory may grow less from there on, for example where logits are made in parts
            last = fit.samples, self.bytes_of(fit.trace)
            larger = self._extrapolate(before, last, limit)
            if larger <= fit.samples or not (found := self._fit(larger, limit)).micro_batch_size:
                break
            before, fit = last, found
        return fit

    def _fit(self, samples: int, limit: float) -> Fit:
        batch, mean_tokens = self.micro_batch(samples)
        trace = self.trace(batch, samples)
        fitting, count = samples if self.bytes_of(trace) <= limit else 0, math.ceil(self.share / samples)
        return Fit(fitting, count, batch, samples, self.step_tokens(samples, mean_tokens), trace)

    def _bytes_with(self, samples: int) -> int:
        return self.bytes_of(self.trace(self.micro_batch(samples)[0], samples))

    def _extrapolate(self, first: tuple[int, int], second: tuple[int, int], limit: float) -> int:
        """Samples that fit, as memory grows between two micro-batches, given as samples and bytes; at least 1."""
        (few, least), (many, most) = sorted((first, second))
        further = (limit - least) / (most - least) * (many - few) if most > least else self.share
        fitting = min(self.share, max(1, few + math.floor(further)))
        # Micro-batches of equal size, so that the last one of a step is about as large as the others.
        return math.ceil(self.share / math.ceil(self.share / fitting))
