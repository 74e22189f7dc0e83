"""One rank of a training run: `python -m pretrain.worker RUN_DIR`, started by torchrun or by the cluster.

It needs neither Ray nor MLflow. It reads RUN_DIR/recipe.json and RUN_DIR/data, goes on from the newest checkpoint
that verifies, and writes metrics.jsonl, checkpoints/ and logs/. Exit codes: 0 done, 75 stopped on request after
saving (start it again to go on), 2 a mistake of the user's, 1 anything else.
"""

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
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

from data_prep.files import cut_torn_line, sha256_json
from data_prep.shards import open_dataset
from pretrain.batches import BatchMaker
from pretrain.checkpoint import CheckpointManifest, CheckpointReader, folder_of_step, newest_good
from pretrain.checkpoint_writer import CheckpointWriter, sweep
from pretrain.config import TrainingConfig
from pretrain.engine import Engine
from pretrain.loop import Hooks, Progress, train
from pretrain.models import build_model, initialise
from pretrain.ranks import Ranks, join
from pretrain.samples import build_indexes

STOPPED = 75
_LOCK_PATIENCE_S = 90.0

log = logging.getLogger("multihop")


def run(run_dir: Path, console: IO[str]) -> int:
    """Train this rank's part of the run in `run_dir` to its end, or until it is asked to stop; the exit code."""
    config = read_config(run_dir)
    stop_asked = _stop_signals(run_dir)
    ranks = join()
    checkpoints, data = run_dir / "checkpoints", open_dataset(run_dir / "data")
    lock = _lock(run_dir) if ranks.rank == 0 else None
    attempt, resume_from = secrets.randbits(32), -1
    if ranks.rank == 0:
        found, passed_over = newest_good(checkpoints)
        resume_from = found.step if found else -1
        swept = sweep(checkpoints, found.step if found else None, f"{attempt:08x}")
        for sentence in passed_over + swept:
            log.warning(sentence)
        build_indexes(run_dir / "index", data, config)
        _note_start(run_dir, ranks, f"{attempt:08x}", max(0, resume_from), passed_over)
    attempt, resume_from = ranks.from_first(attempt), ranks.from_first(resume_from)

    checkpoint = folder_of_step(checkpoints, resume_from) if resume_from >= 0 else None
    engine, progress = _restore(
        config, data.manifest.tokenizer.vocab_size, ranks, checkpoint, data.manifest.fingerprint
    )
    batches = BatchMaker.open(config, run_dir / "data", run_dir / "index", ranks.rank, ranks.world_size)
    writer = CheckpointWriter(checkpoints, ranks.rank, ranks.world_size, f"{attempt:08x}", config.checkpoint.keep)
    parameters = {name: list(parameter.shape) for name, parameter in engine.module.named_parameters()}

    def save(progress: Progress) -> None:
        tensors, updates = engine.state()
        manifest = CheckpointManifest(
            step=progress.step,
            tokens=progress.tokens,
            updates=updates,
            world_size=ranks.world_size,
            zero_stage=config.engine.zero_stage,
            parameters=parameters,
            files=[],
            recipe_fingerprint=recipe_fingerprint(config),
            data_fingerprint=data.manifest.fingerprint,
            mlflow_run_id=os.environ.get("MULTIHOP_MLFLOW_RUN_ID"),
        )
        writer.save(tensors, manifest)

    if ranks.rank == 0:
        cut_torn_line(run_dir / "metrics.jsonl")
    with open(run_dir / "metrics.jsonl", "a") as metrics:
        emit = _emitter(metrics, console) if ranks.rank == 0 else _ignore
        finished = train(engine, batches, progress, Hooks(emit, save, stop_asked))
        writer.wait()
    ranks.from_first(0)  # nobody leaves before rank 0 has committed
    ranks.leave()
    if lock is not None:
        lock.release()
    return 0 if finished else STOPPED


def read_config(run_dir: Path) -> TrainingConfig:
    """The part of RUN_DIR/recipe.json that training reads.

    Raises:
        ValueError: there is none, or it is not a resolved recipe.
    """
    path = run_dir / "recipe.json"
    try:
        recipe = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; `multihop train RECIPE` writes it") from None
    return TrainingConfig.model_validate({key: recipe[key] for key in TrainingConfig.model_fields if key in recipe})


def recipe_fingerprint(config: TrainingConfig) -> str:
    """Hash of what decides a run's weights; how often it logs, evaluates and saves does not."""
    content = config.model_dump(mode="json", exclude={"checkpoint"})
    for key in ("log_every", "evaluate_every", "heldout_samples"):
        del content["engine"][key]
    return sha256_json(content)


def _restore(
    config: TrainingConfig, vocab_size: int, ranks: Ranks, checkpoint: Path | None, data_fingerprint: str
) -> tuple[Engine, Progress]:
    model = build_model(config.model, vocab_size)
    if checkpoint is None:
        initialise(model, config.seed)
        return Engine(config, model, ranks), Progress()
    with CheckpointReader(checkpoint) as reader:
        saved = reader.manifest
        for what, then, now in (
            ("data", saved.data_fingerprint, data_fingerprint),
            ("recipe", saved.recipe_fingerprint, recipe_fingerprint(config)),
        ):
            if then != now:
                raise ValueError(
                    f"{checkpoint} was trained with another {what} (fingerprint {then[:12]}, now {now[:12]}); "
                    f"go on with the {what} of then, or start a run of another name"
                )
        model.load_state_dict(dict(reader.weights()))
        engine = Engine(config, model, ranks)
        engine.restore(lambda kind, piece: reader.read(kind, piece.name, piece.start, piece.numel), saved.updates)
    log.info("goes on from %s", checkpoint)
    return engine, Progress(saved.step, saved.tokens)


def _stop_signals(run_dir: Path) -> Callable[[], bool]:
    """SIGTERM, SIGINT or a file `stop` in the run directory ask the run to finish its step, save and leave."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    stop_file = run_dir / "stop"
    return lambda: bool(received) or stop_file.exists()


def _lock(run_dir: Path) -> FileLock:
    """Held by rank 0 while it writes; the ranks of a driver that was killed may need a moment to die."""
    lock = FileLock(run_dir / "worker.lock", timeout=_LOCK_PATIENCE_S)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another training process has been writing to {run_dir} for {_LOCK_PATIENCE_S:.0f} s; end it first"
        ) from None
    return lock


def _note_start(run_dir: Path, ranks: Ranks, attempt: str, step: int, passed_over: list[str]) -> None:
    row = {
        "attempt": attempt,
        "time": time.time(),
        "step": step,
        "world_size": ranks.world_size,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "passed_over": passed_over,
    }
    cut_torn_line(run_dir / "starts.jsonl")
    with open(run_dir / "starts.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def _emitter(metrics: IO[str], console: IO[str]) -> Callable[[dict[str, Any]], None]:
    def emit(row: dict[str, Any]) -> None:
        line = json.dumps({**row, "time": time.time()})
        metrics.write(line + "\n")
        metrics.flush()
        print(line, file=console, flush=True)

    return emit


def _ignore(row: dict[str, Any]) -> None:
    """Only rank 0 writes metrics."""


def _log_to(path: Path) -> IO[str]:
    """Send all this process prints, native code included, to `path`; returns what was standard output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    console = os.fdopen(os.dup(1), "w")
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    return console


def main() -> int:
    """The command `python -m pretrain.worker RUN_DIR`."""
    if len(sys.argv) != 2:
        print("usage: python -m pretrain.worker RUN_DIR", file=sys.stderr)
        return 2
    run_dir = Path(sys.argv[1])
    console = _log_to(run_dir / "logs" / f"rank-{os.environ.get('RANK', '0')}.log")
    try:
        return run(run_dir, console)
    except ValueError as error:
        log.exception("cannot train")
        print(error, file=console, flush=True)
        return 2
    except Exception as error:
        log.exception("training failed")
        print(f"{type(error).__name__}: {error}", file=console, flush=True)
        return 1


if __name__ == "__main__":
    # Not sys.exit: a save's thread or gloo's may wait for a rank that is gone, and would keep the process alive.
    code = main()
    logging.shutdown()
    os._exit(code)
