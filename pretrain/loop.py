"""The training loop.

for every step that is left:
    take the step's micro-batches            pretrain.order, pretrain.batches
    agree on the counts to divide by
    forward and backward each micro-batch    pretrain.engine
    update with the step's learning rate     pretrain.schedule
    log, evaluate, save, stop                where their turn is, or somebody asked
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pretrain.batches import BatchMaker, prefetched
from pretrain.engine import Engine
from pretrain.keyed import key_of
from pretrain.order import total_steps
from pretrain.references import uniform_loss, unigram_loss
from pretrain.schedule import learning_rate

Row = dict[str, Any]


@dataclass
class Progress:
    """How far a run is: all that a loop needs beside the weights and moments."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Real pieces seen, over all ranks."""


@dataclass(frozen=True)
class Hooks:
    """What the loop tells the world, and asks it."""

    emit: Callable[[Row], None]
    """Takes a row of metrics; called on every rank."""
    save: Callable[[Progress], None]
    """Saves a checkpoint; called on every rank."""
    stop_asked: Callable[[], bool]
    """Whether this rank was asked to save and leave."""


@dataclass
class _Clock:
    """Where the time since the last logged step went."""

    started: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    tokens: int = 0


def train(engine: Engine, batches: BatchMaker, progress: Progress, hooks: Hooks) -> bool:
    """Train from `progress.step` to the last step; true when done, false when stopped on request after saving.

    Raises:
        FloatingPointError: a loss or gradient that is not finite, with the step's number.
    """
    config = batches.config
    last = total_steps(config.phases)
    if progress.step == 0:
        hooks.emit({"step": 0, "tokens": 0, **evaluate(engine, batches)})
    stream = prefetched(batches.step, range(progress.step, last))
    clock = _Clock()
    while progress.step < last:
        step, before = progress.step, time.monotonic()
        mine = next(stream)
        clock.waited += time.monotonic() - before

        asked = {"stop": float(hooks.stop_asked()), "tokens": float(mine.tokens), **mine.counts}
        agreed = engine.ranks.sum(asked)
        sums: dict[str, float] = {}
        for number, batch in enumerate(mine.micro_batches):
            torch.manual_seed(key_of("dropout", config.seed, step, number, engine.ranks.rank) >> 1)
            for name, value in engine.forward_backward(batch, agreed).items():
                sums[name] = sums.get(name, 0.0) + value
        lr = learning_rate(config.phases, step)
        grad_norm = engine.step(lr)

        sums = engine.ranks.sum(sums)
        losses = means(sums, agreed)
        if not (math.isfinite(losses["loss"]) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {step + 1}: loss {losses['loss']}, gradient norm {grad_norm}; the run goes on from its last "
                "checkpoint, but would come here again: lower phases[].lr or lengthen the warm-up in a new run"
            )
        progress.step += 1
        progress.tokens += int(agreed["tokens"])
        clock.tokens += int(agreed["tokens"])

        stopping = agreed["stop"] > 0
        if progress.step % config.engine.log_every == 0 or progress.step == last:
            elapsed = time.monotonic() - clock.started
            rate = {"tokens_per_s": clock.tokens / elapsed, "data_wait": clock.waited / elapsed}
            row = {"step": progress.step, "tokens": progress.tokens, **losses, "lr": lr, "grad_norm": grad_norm}
            hooks.emit(row | rate)
            clock = _Clock()
        if progress.step % config.engine.evaluate_every == 0 or progress.step == last:
            hooks.emit({"step": progress.step, "tokens": progress.tokens, **evaluate(engine, batches)})
            clock = _Clock()
        if progress.step % config.checkpoint.every_steps == 0 or progress.step == last or stopping:
            hooks.save(progress)
        if stopping and progress.step < last:
            return False
    return True


def means(sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    """Sums over all ranks as means in nats: `loss` and its parts, and the share of next-sentence hits."""
    parts = {f"{name}_loss": sums[name] / counts[name] for name in sums if name in counts}
    if "nsp_hits" in sums:
        parts["nsp_accuracy"] = sums["nsp_hits"] / counts["nsp"]
    return {"loss": sum(sums[name] / counts[name] for name in sums if name in counts), **parts}


def evaluate(engine: Engine, batches: BatchMaker) -> dict[str, float]:
    """The held-out losses, and those of the two references on the same pieces."""
    mine = batches.heldout()
    manifest = batches.data.manifest
    targets = np.concatenate([batch.targets for batch in mine.micro_batches])
    unigram = unigram_loss(batches.token_counts, targets) * len(targets) if len(targets) else 0.0
    sums = engine.ranks.sum({**engine.evaluate(mine.micro_batches), "unigram": unigram})
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
