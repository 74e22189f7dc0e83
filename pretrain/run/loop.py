"""The training loop.

sum the first step's counts over the ranks
for every remaining step:
    forward and backward each micro-batch             multihop.pretrain.engine.engine
    start to sum the next step's counts               multihop.pretrain.data.loader, multihop.pretrain.engine.ranks
    update with the step's learning rate              multihop.pretrain.optim.schedule
    log, evaluate, check the replicas, save or stop if due

The host waits for the device once per step, in the update, for the gradient's norm. While the device works, the hosts
take the next step's batch and sum its counts; requests to stop or trace are sent with the counts, so that all ranks act
on them at the same step. Losses are read from the device only when they are logged.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multihop.common.counter_rng import key_of
from multihop.common.json_lines import Row
from multihop.pretrain.checkpoint.manifest import TrainState
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder, RankBatch
from multihop.pretrain.data.loader import prefetch_batches
from multihop.pretrain.data.phases import is_skipped, model_after
from multihop.pretrain.engine.engine import Engine, StepResult, read_scalars
from multihop.pretrain.optim.schedule import learning_rate
from multihop.pretrain.run.heldout import evaluate, mean_losses
from multihop.pretrain.run.hooks import Hooks
from multihop.pretrain.run.throughput import ThroughputMeter, step_flops


@dataclass(frozen=True)
class _Share:
    """A rank's share of a step, and its totals over all ranks."""

    batch: RankBatch
    totals: dict[str, float]
    """Sums over all ranks: the number of terms of each loss, `tokens`, `flops`, and the requests `stop` and `trace`."""

    @property
    def divisors(self) -> dict[str, float]:
        """The divisors of the summed losses, at least 1: an empty sum gives a loss and a gradient of 0."""
        return {name: max(1.0, self.totals[name]) for name in self.batch.counts}

    @property
    def is_empty(self) -> bool:
        """Whether no rank has anything to predict, for example because no whole word fits `objective.mask_rate`."""
        return not any(self.totals[name] for name in self.batch.counts)


def train(
    engine: Engine, batches: BatchBuilder, progress: TrainState, hooks: Hooks, last: int, peak_flops: float
) -> bool:
    """Train from `progress.step` to the last step; true when done, false when stopped on request after saving.

    Args:
        last: Steps done at the end, at most those of the recipe.
        peak_flops: Floating-point operations per second that the devices of all ranks can do together.

    Raises:
        FloatingPointError: `engine.max_consecutive_nonfinite_steps` steps in a row had a non-finite loss or gradient.
        InconsistentStateError: The ranks differ in what is equal on all of them.
    """
    config = batches.config
    engine.module.config = model_after(config.model, config.phases, progress.step)
    if progress.step == 0:
        hooks.emit(_progress_row(batches, progress) | evaluate(engine, batches, hooks.heartbeat))
    prefetched = prefetch_batches(batches, range(progress.step, last), config.engine.data_workers)
    meter = ThroughputMeter()
    share = _start_next(engine, batches, meter.next_batch(prefetched), hooks)()
    while progress.step < last:
        step, row, applied, stopping = progress.step, Row(), True, False
        log_due = (step + 1) % config.engine.log_interval == 0 or step + 1 == last
        if not is_skipped(config.phases, step):
            assert share is not None
            hooks.trace(int(share.totals["trace"]))
            empty = share.is_empty
            engine.module.config = model_after(config.model, config.phases, step + 1)
            sums = {} if empty else _forward_backward(engine, config, share, hooks.heartbeat)
            start_next = _start_next(engine, batches, meter.next_batch(prefetched), hooks)
            lr = learning_rate(config.phases, step)
            result = StepResult(0.0, False) if empty else engine.step(lr)
            applied = result.applied
            if log_due or not applied:
                row = _losses(engine, sums, share) | _metrics(engine, lr, result)
            progress.tokens += int(share.totals["tokens"])
            progress.skipped += not applied
            if not empty:  # an empty step is no sign of divergence
                progress.skipped_in_a_row = 0 if applied else progress.skipped_in_a_row + 1
            meter.count(share.totals)
            share = start_next()
            stopping = share is not None and share.totals["stop"] > 0
        progress.step += 1

        if not applied:
            hooks.record_skipped(step, row)
            hooks.emit(_progress_row(batches, progress) | {"skipped_step": step, "lr": row["lr"]})
            if progress.skipped_in_a_row >= config.engine.max_consecutive_nonfinite_steps:
                raise FloatingPointError(_nonfinite_message(step, progress))
        elif row:
            hooks.emit(_progress_row(batches, progress) | row | meter.rates(peak_flops, engine.ranks.device))
            meter = ThroughputMeter()
        if progress.step % config.engine.eval_interval == 0 or progress.step == last:
            hooks.emit(_progress_row(batches, progress) | evaluate(engine, batches, hooks.heartbeat))
            meter = ThroughputMeter()
        save_due = progress.step % config.checkpoint.save_interval == 0 or progress.step == last or stopping
        check_interval = config.engine.replica_check_interval
        if save_due or (check_interval is not None and progress.step % check_interval == 0):
            found = hooks.check_replicas(progress)
            if found:
                hooks.emit(_progress_row(batches, progress) | found)
        if save_due:
            hooks.save(progress)
        if stopping:
            return False
    return True


def _start_next(
    engine: Engine, batches: BatchBuilder, batch: RankBatch | None, hooks: Hooks
) -> Callable[[], _Share | None]:
    """Start to sum over the ranks the totals that a step needs; call the result to wait for them.

    After the last step the result returns None, on all ranks, which then exchange nothing.
    """
    if batch is None:
        return lambda: None
    vocab_size = batches.data.manifest.output_tokenizer.vocab_size
    flops = sum(step_flops(batches.config.model, vocab_size, micro_batch) for micro_batch in batch.micro_batches)
    requests = {"stop": float(hooks.stop_requested()), "trace": float(hooks.trace_requested())}
    counts = {name: float(count) for name, count in batch.counts.items()}
    totals = engine.ranks.start_all_reduce_sum({**requests, **counts, "tokens": float(batch.tokens), "flops": flops})
    return lambda: _Share(batch, totals())


def _forward_backward(
    engine: Engine, config: TrainingConfig, share: _Share, heartbeat: Callable[[], None]
) -> dict[str, Tensor]:
    """Accumulate the step's gradient; returns this rank's sums over its micro-batches, on the device."""
    sums: dict[str, Tensor] = {}
    for number, micro_batch in enumerate(share.batch.micro_batches):
        heartbeat()
        torch.manual_seed(key_of("dropout", config.seed, share.batch.step, number, engine.ranks.rank) >> 1)
        for name, value in engine.forward_backward(micro_batch, share.divisors).items():
            sums[name] = sums[name] + value if number else value
    return sums


def _losses(engine: Engine, sums: dict[str, Tensor], share: _Share) -> dict[str, float]:
    """A step's losses over all ranks. Waits for the device."""
    scalars = read_scalars(sums) if sums else dict.fromkeys(share.divisors, 0.0)
    return mean_losses(engine.ranks.all_reduce_sum(scalars), share.divisors)


def _metrics(engine: Engine, lr: float, result: StepResult) -> Row:
    return {"lr": lr, "grad_norm": result.grad_norm, **engine.metrics()}


def _progress_row(batches: BatchBuilder, progress: TrainState) -> Row:
    samples = batches.order.samples_before(progress.step)
    return {"step": progress.step, "samples": samples, "tokens": progress.tokens, "skipped": progress.skipped}


def _nonfinite_message(step: int, progress: TrainState) -> str:
    return (
        f"{progress.skipped_in_a_row} consecutive steps, the last of them step {step}, had a non-finite loss or "
        f"gradient, the limit of engine.max_consecutive_nonfinite_steps; look at the samples with `multihop inspect "
        f"batch RECIPE --step {step}`, then skip them with phases[].skip_steps or lower phases[].lr, with "
        "--allow-change"
    )
