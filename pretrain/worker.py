"""One rank of a training run: `python -m pretrain.worker RUN_DIR`, started by torchrun or by the cluster.

It needs neither Ray nor MLflow. It reads RUN_DIR/recipe.json and RUN_DIR/data, goes on from the newest checkpoint
that verifies, and writes metrics.jsonl, checkpoints/ and logs/. Exit codes: 0 done, 75 stopped on request after
saving (start it again to go on), 2 a mistake of the user's, 1 anything else.
"""

import faulthandler
import json
import logging
import os
import platform
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

from data_prep.files import DISK_FULL, cut_torn_line, make_folder, naming, open_append, write_atomically
from data_prep.rows import append_row
from data_prep.shards import open_dataset
from pretrain.batches import BatchMaker
from pretrain.changes import training_part
from pretrain.checkpoint import CheckpointManifest, newest_good
from pretrain.checkpoint_writer import CheckpointWriter
from pretrain.flops import datasheet_rate, matmul_rate
from pretrain.host_memory import keep_freed_memory
from pretrain.loop import Hooks, Progress, train
from pretrain.micro_batch import DTYPES, micro_batches
from pretrain.ranks import Ranks, join
from pretrain.restore import start_engine
from pretrain.retention import sweep
from pretrain.run_files import GAVE_UP, checkpoints_of, claim_checkpoints, read_config
from pretrain.samples import build_indexes
from pretrain.starting import MLFLOW_RUN_ID, STOPPED, SUPERVISED, StartTimes
from pretrain.tracing import Tracer, asked_steps

_LOCK_PATIENCE_S = 90.0

log = logging.getLogger("multihop")


def train_run(run_dir: Path, ranks: Ranks, times: StartTimes, console: IO[str] = sys.stdout) -> int:
    """Train this rank's part of the run in `run_dir` to its end, or until it is asked to stop; the exit code."""
    config = read_config(run_dir)
    if config.engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    stop_asked = _stop_signals(run_dir)
    checkpoints, data = checkpoints_of(run_dir, config), open_dataset(run_dir / "data")
    lock = _lock(run_dir) if ranks.rank == 0 else None
    attempt, resume_from, passed_over, run = secrets.randbits(32), -1, list[str](), ""
    if ranks.rank == 0:
        run = claim_checkpoints(run_dir, checkpoints)
        found, passed_over = newest_good(checkpoints)
        resume_from = found.step if found else -1
        swept = sweep(checkpoints, found.step if found else None, f"{run[:8]}-{attempt:08x}")
        for sentence in passed_over + swept:
            log.warning(sentence)
        build_indexes(run_dir / "index", data, config)
    attempt, resume_from = ranks.from_first(attempt), ranks.from_first(resume_from)
    run_start = f"{ranks.from_first(int(run[:8] or '0', 16)):08x}-{attempt:08x}"
    times.lap("checking")

    rate = matmul_rate(ranks.device, DTYPES[config.engine.precision])
    peak_flops = ranks.sum({"rate": rate})["rate"]
    sizes = micro_batches(config, run_dir, ranks)
    batches = BatchMaker.open(config, run_dir / "data", run_dir / "index", ranks.rank, ranks.world_size, sizes)
    started = start_engine(config, run_dir, data.manifest, ranks, max(sizes), resume_from)
    engine, progress = started.engine, started.progress
    writer = CheckpointWriter(
        checkpoints,
        ranks.rank,
        ranks.world_size,
        run_start,
        config.checkpoint.keep,
        config.checkpoint.keep_every,
    )
    writer.prepare(engine.state()[0])

    def save(progress: Progress) -> None:
        if ranks.rank == 0:
            os.fsync(metrics.fileno())  # no checkpoint is to outlive the rows of the steps before it
        tensors, updates, counters = engine.state()
        manifest = CheckpointManifest(
            run=run or None,
            step=progress.step,
            tokens=progress.tokens,
            updates=updates,
            skipped=progress.skipped,
            skipped_in_a_row=progress.skipped_in_a_row,
            counters=counters,
            world_size=ranks.world_size,
            zero_stage=config.engine.zero_stage,
            parameters={name: list(shape) for name, shape in engine.parameters.items()},
            files=[],
            recipe=training_part(config),
            data_fingerprint=data.manifest.fingerprint,
            tokenizer_sha256=data.manifest.tokenizer.sha256,
            parent=started.parent,
            mlflow_run_id=os.environ.get(MLFLOW_RUN_ID),
        )
        writer.save(tensors, manifest)

    if ranks.rank == 0:
        cut_torn_line(run_dir / "metrics.jsonl")
        times.lap("restoring")
        _note_start(run_dir, ranks, f"{attempt:08x}", max(0, resume_from), passed_over, rate, times)
    tracer = Tracer(run_dir / "logs", ranks.rank)
    with TextIOWrapper(open_append(run_dir / "metrics.jsonl")) as metrics:
        hooks = Hooks(
            emit=_emitter(metrics, console) if ranks.rank == 0 else _ignore,
            save=save,
            stop_asked=stop_asked,
            not_finite=_noter(run_dir / "skipped.jsonl", batches) if ranks.rank == 0 else _ignore,
            alive=_watchdog(config.engine.hang_timeout_s),
            trace_asked=lambda: asked_steps(run_dir / "trace") if ranks.rank == 0 else 0,
            trace=tracer.before_step,
        )
        try:
            finished = train(engine, batches, progress, hooks, peak_flops)
        except FloatingPointError:  # on all ranks at once: the save under way is not to be lost with them
            writer.wait()
            ranks.from_first(0)  # nobody leaves before rank 0 has committed
            raise
        tracer.finish()
        writer.wait()
    if not finished:
        log.warning("stopped on request, by a signal or by %s, which has to go before the next start", run_dir / "stop")
    ranks.from_first(0)  # nobody leaves before rank 0 has committed
    faulthandler.cancel_dump_traceback_later()
    engine.destroy()
    if lock is not None:
        lock.release()
    return 0 if finished else STOPPED


def _stop_signals(run_dir: Path) -> Callable[[], bool]:
    """SIGTERM, SIGINT or a file `stop` in the run directory ask the run to finish its step, save and leave."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    stop_file = run_dir / "stop"
    return lambda: bool(received) or stop_file.exists()


def _watchdog(timeout_s: float) -> Callable[[], None]:
    """Each call puts off the moment at which this process writes the stacks of all its threads to its log and ends.

    The moment is kept by a thread outside of Python, which a deadlock does not stop. One silent rank silences all,
    so that each writes its own stacks; whoever started the ranks starts them again.
    """

    def alive() -> None:
        faulthandler.dump_traceback_later(timeout_s, exit=True)

    alive()
    return alive


def _lock(run_dir: Path) -> FileLock:
    """Held by rank 0 while it writes; the ranks of a driver that was killed may need a moment to die."""
    lock = FileLock(run_dir / "worker.lock", timeout=_LOCK_PATIENCE_S)
    try:
        lock.acquire()
    except Timeout:
        raise TimeoutError(
            f"another training process has been writing to {run_dir} for {_LOCK_PATIENCE_S:.0f} s; end it first"
        ) from None
    return lock


def _note_start(
    run_dir: Path, ranks: Ranks, attempt: str, step: int, passed_over: list[str], rate: float, times: StartTimes
) -> None:
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else platform.processor() or "CPU"
    datasheet = datasheet_rate(device)
    row = {
        "attempt": attempt,
        "time": time.time(),
        "step": step,
        "world_size": ranks.world_size,
        "host": socket.gethostname(),
        "device": device,
        "threads": torch.get_num_threads(),
        "matmul_tflops_per_s": rate / 1e12,
        "datasheet_tflops_per_s": None if datasheet is None else datasheet / 1e12,
        "passed_over": passed_over,
        "seconds": times.seconds,
    }
    append_row(run_dir / "starts.jsonl", row)


def _emitter(metrics: IO[str], console: IO[str]) -> Callable[[dict[str, Any]], None]:
    def emit(row: dict[str, Any]) -> None:
        line = json.dumps({**row, "time": time.time()})
        with naming(Path(metrics.name)):
            metrics.write(line + "\n")
            metrics.flush()
        print(line, file=console, flush=True)

    return emit


def _noter(path: Path, batches: BatchMaker) -> Callable[[int, dict[str, Any]], None]:
    """Writes down which samples were in a step whose loss or gradient was not finite."""

    def note(step: int, losses: dict[str, Any]) -> None:
        chosen = batches.choose(step)
        row = {"step": step, "phase": chosen.phase, "samples": chosen.samples.tolist()}
        row |= {name: repr(value) for name, value in losses.items()}
        log.warning("step %d was passed over: loss %s, gradient norm %s", step, losses["loss"], losses["grad_norm"])
        append_row(path, row)

    return note


def _ignore(*_: object) -> None:
    """Only rank 0 writes."""


def _comes_again(error: BaseException) -> bool:
    """Whether another start would end in the same way: steps that are not finite, or a full disk."""
    if isinstance(error, FloatingPointError) or (isinstance(error, OSError) and error.errno in DISK_FULL):
        return True
    return error.__cause__ is not None and _comes_again(error.__cause__)


def _log_to(path: Path) -> IO[str]:
    """Send all this process prints, native code included, to `path`; returns what was standard output."""
    make_folder(path.parent, mode=0o700)  # nobody knows what native code will print
    console = os.fdopen(os.dup(1), "w")
    with open_append(path) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    return console


def main() -> int:
    """The command `python -m pretrain.worker RUN_DIR`."""
    if len(sys.argv) != 2:
        print("usage: python -m pretrain.worker RUN_DIR", file=sys.stderr)
        return 2
    keep_freed_memory()
    run_dir = Path(sys.argv[1])
    try:
        console = _log_to(run_dir / "logs" / f"rank-{os.environ.get('RANK', '0')}.log")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    times = StartTimes()
    try:
        ranks = join(run_dir)
        times.lap("meeting")
        code = train_run(run_dir, ranks, times, console)
        ranks.leave()
        return code
    except Exception as error:
        log.exception("training failed")
        code, known = (2, True) if isinstance(error, ValueError) else (1, _comes_again(error))
        print(error if known else f"{type(error).__name__}: {error}", file=console, flush=True)
        if known and SUPERVISED in os.environ:  # the cluster would start the ranks again
            reason = {"code": code, "message": str(error)}
            write_atomically(run_dir / GAVE_UP, json.dumps(reason).encode())
        return code


if __name__ == "__main__":
    # Not sys.exit: a save's thread or gloo's may wait for a rank that is gone, and would keep the process alive.
    code = main()
    logging.shutdown()
    os._exit(code)
