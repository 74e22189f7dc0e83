"""The training loop.

for every step that is left:
    take the step's micro-batches            pretrain.order, pretrain.batches
    agree on the counts to divide by
    forward and backward each micro-batch    pretrain.engine
    update with the step's learning rate     pretrain.schedule
    log, evaluate, save, stop                where their turn is, or somebody asked
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.batches import BatchMaker, RankStep, stream
from pretrain.config import TrainingConfig
from pretrain.engine import Engine
from pretrain.flops import step_flops
from pretrain.keyed import key_of
from pretrain.objectives.batch import Batch
from pretrain.order import is_skipped, samples_before, total_steps
from pretrain.references import uniform_loss, unigram_loss
from pretrain.schedule import learning_rate

Row = dict[str, Any]


@dataclass
class Progress:
    """How far a run is: all that a loop needs beside the weights and moments."""

    step: int = 0
    """Optimizer steps done; the next one has this number."""
    tokens: int = 0
    """Real pieces seen, over all ranks."""
    skipped: int = 0
    """Steps that were passed over because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Hooks:
    """What the loop tells the world, and asks it."""

    emit: Callable[[Row], None]
    """Takes a row of metrics; called on every rank."""
    save: Callable[[Progress], None]
    """Saves a checkpoint; called on every rank."""
    stop_asked: Callable[[], bool]
    """Whether this rank was asked to save and leave."""
    not_finite: Callable[[int, Row], None]
    """Is told the number of a step that was passed over, and its losses; called on every rank."""
    alive: Callable[[], None]
    """Is called again and again as long as the rank gets anywhere."""
    trace_asked: Callable[[], int]
    """How many steps this rank was asked to trace since the last call."""
    trace: Callable[[int], None]
    """Is called before each step, with the number of steps to trace from here on where somebody asked."""


@dataclass
class _Clock:
    """Where the time since the last logged step went."""

    started: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    tokens: int = 0
    flops: float = 0.0

    def wait_for(self, coming: Iterator[RankStep]) -> RankStep:
        before = time.monotonic()
        mine = next(coming)
        self.waited += time.monotonic() - before
        return mine

    def rates(self, peak_flops: float) -> Row:
        elapsed = time.monotonic() - self.started
        return {
            "tokens_per_s": self.tokens / elapsed,
            "data_wait": self.waited / elapsed,
            "tflops_per_s": self.flops / elapsed / 1e12,
            "mfu": self.flops / elapsed / peak_flops,
        }


def train(engine: Engine, batches: BatchMaker, progress: Progress, hooks: Hooks, peak_flops: float) -> bool:
    """Train from `progress.step` to the last step; true when done, false when stopped on request after saving.

    Args:
        peak_flops: floating-point operations a second that all ranks' devices together do at best.

    Raises:
        FloatingPointError: `engine.max_skipped` steps in a row had a loss or gradient that was not finite.
    """
    config = batches.config
    last = total_steps(config.phases)
    if progress.step == 0:
        hooks.emit(_counted(config, progress) | evaluate(engine, batches, hooks.alive))
    coming = stream(batches, range(progress.step, last), config.engine.data_workers)
    clock = _Clock()
    while progress.step < last:
        step, row, stopping = progress.step, Row(), False
        if not is_skipped(config.phases, step):
            mine = clock.wait_for(coming)
            agreed = _agree(engine, batches, mine, hooks)
            row, applied = _take(engine, config, mine, agreed, hooks)
            progress.tokens += int(agreed["tokens"])
            clock.tokens += int(agreed["tokens"])
            clock.flops += agreed["flops"]
            progress.skipped += not applied
            progress.skipped_in_a_row = 0 if applied else progress.skipped_in_a_row + 1
            stopping = agreed["stop"] > 0
        progress.step += 1

        if progress.skipped_in_a_row and row:
            hooks.not_finite(step, row)
            hooks.emit(_counted(config, progress) | {"skipped_step": step, "lr": row["lr"]})
            if progress.skipped_in_a_row >= config.engine.max_skipped:
                raise FloatingPointError(_why_it_ends(step, progress))
        elif row and (progress.step % config.engine.log_every == 0 or progress.step == last):
            hooks.emit(_counted(config, progress) | row | clock.rates(peak_flops))
            clock = _Clock()
        if progress.step % config.engine.evaluate_every == 0 or progress.step == last:
            hooks.emit(_counted(config, progress) | evaluate(engine, batches, hooks.alive))
            clock = _Clock()
        if progress.step % config.checkpoint.every_steps == 0 or progress.step == last or stopping:
            hooks.save(progress)
        if stopping and progress.step < last:
            return False
    return True


def _agree(engine: Engine, batches: BatchMaker, mine: RankStep, hooks: Hooks) -> dict[str, float]:
    """What all ranks have to know before the step: by how many to divide, and whether somebody asked for something."""
    asked = {"stop": float(hooks.stop_asked()), "trace": float(hooks.trace_asked()), "tokens": float(mine.tokens)}
    vocab_size = batches.data.manifest.tokenizer.vocab_size
    flops = sum(step_flops(batches.config.model, vocab_size, batch) for batch in mine.micro_batches)
    agreed = engine.ranks.sum({**asked, "flops": flops, **mine.counts})
    hooks.trace(int(agreed["trace"]))
    return agreed


def _take(
    engine: Engine, config: TrainingConfig, mine: RankStep, agreed: dict[str, float], hooks: Hooks
) -> tuple[Row, bool]:
    """One optimizer step: its losses over all ranks and its numbers, and whether it was applied."""
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(mine.micro_batches):
        hooks.alive()
        torch.manual_seed(key_of("dropout", config.seed, mine.step, number, engine.ranks.rank) >> 1)
        for name, value in engine.forward_backward(batch, agreed).items():
            sums[name] = sums[name] + value if number else value
    lr = learning_rate(config.phases, mine.step)
    taken = engine.step(lr)
    losses = means(engine.ranks.sum(sums), agreed)
    return {**losses, "lr": lr, "grad_norm": taken.grad_norm, **engine.numbers()}, taken.applied


def _counted(config: TrainingConfig, progress: Progress) -> Row:
    samples = samples_before(config.phases, progress.step)
    return {"step": progress.step, "samples": samples, "tokens": progress.tokens, "skipped": progress.skipped}


def _why_it_ends(step: int, progress: Progress) -> str:
    first = progress.step - progress.skipped_in_a_row
    return (
        f"the last {progress.skipped_in_a_row} steps, {first} to {step}, had a loss or gradient that was not finite; "
        f"see what is in them by `multihop inspect batch RECIPE --step {first}`, then pass over them by "
        "phases[].skip_steps, or lower phases[].lr, with --allow-change"
    )


def means(sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    """Sums over all ranks as means in nats: `loss` and its parts, and the share of pairs that were told right."""
    parts = {f"{name}_loss": sums[name] / counts[name] for name in sums if name in counts}
    for name in ("nsp", "sop"):
        if f"{name}_hits" in sums:
            parts[f"{name}_accuracy"] = sums[f"{name}_hits"] / counts[name]
    return {"loss": sum(sums[name] / counts[name] for name in sums if name in counts), **parts}


def evaluate(engine: Engine, batches: BatchMaker, alive: Callable[[], None]) -> dict[str, float]:
    """The held-out losses, and those of the two references on the same pieces."""
    mine = batches.heldout()
    manifest = batches.data.manifest
    targets = np.concatenate([batch.targets for batch in mine.micro_batches])
    unigram = unigram_loss(batches.token_counts, targets) * len(targets) if len(targets) else 0.0
    sums = engine.ranks.sum({**engine.evaluate(_telling(mine.micro_batches, alive)), "unigram": unigram})
    counts = engine.ranks.sum({name: float(count) for name, count in mine.counts.items()})
    unigram_sum = sums.pop("unigram")
    losses = means(sums, counts)
    heldout = {f"heldout_{name}": value for name, value in losses.items() if name not in ("loss", "token_loss")}
    return {
        "heldout_loss": losses["token_loss"],
        **heldout,
        "unigram_loss": unigram_sum / counts["token"],
        "uniform_loss": uniform_loss(manifest.tokenizer.vocab_size),
    }


def _telling(batches: Iterable[Batch], alive: Callable[[], None]) -> Iterator[Batch]:
    for batch in batches:
        alive()
        yield batch
