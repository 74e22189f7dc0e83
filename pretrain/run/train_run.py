"""One rank's part of a training run: connects data, engine, checkpoints and records, and runs the loop."""

import faulthandler
import logging
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from multihop.common.errors import DONE, STOPPED
from multihop.common.files import open_append, sha256_json, truncate_torn_line
from multihop.common.journal import JournalWriter
from multihop.common.json_lines import Row
from multihop.common.storage import open_folder
from multihop.data_prep.dataset.shards import TokenDataset, open_dataset
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, TrainState
from multihop.pretrain.checkpoint.owner import claim_checkpoints
from multihop.pretrain.checkpoint.retention import sweep
from multihop.pretrain.checkpoint.verify_shared import newest_good_shared
from multihop.pretrain.checkpoint.writer import CheckpointWriter
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.data.shard_requests import await_shard
from multihop.pretrain.data.word_vectors import build_word_vectors
from multihop.pretrain.engine.device import matmul_rate, use_deterministic_kernels
from multihop.pretrain.engine.micro_batch import DTYPES, micro_batch_sizes
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.engine.replicas import InconsistentStateError, check_installed, check_replicas, state_checksums
from multihop.pretrain.environment import LAST_STEP, LAUNCH, MLFLOW_RUN_ID, REMOTE_RUN, SUPERVISED
from multihop.pretrain.run.audits import steps_of_audits
from multihop.pretrain.run.changes import recorded_part
from multihop.pretrain.run.check_start import check_checkpoints_exist, check_steps_left
from multihop.pretrain.run.files import JOURNAL, ROWS, STATE_CHECKSUMS, STOP_FILE, checkpoints_of, read_config
from multihop.pretrain.run.hooks import Hooks, Tracer, read_trace_request, stop_requests, watchdog
from multihop.pretrain.run.load_engine import LoadedEngine, load_engine
from multihop.pretrain.run.loop import train
from multihop.pretrain.run.records import LaunchTimes, append_launch, metrics_writer, skipped_writer, sync_metrics
from multihop.pretrain.run.throughput import peak_rate

_LOCK_TIMEOUT_S = 90.0
"""Seconds to wait for the lock: the ranks of a killed driver may take a moment to exit."""

log = logging.getLogger("multihop")


@dataclass(frozen=True)
class _Resume:
    """The checkpoint to resume from, and the ids of the run and this launch. Ranks other than 0 have only the first
    three fields."""

    step: int
    """Step of the checkpoint to resume from; -1: none."""
    launch: str
    """This launch's random id."""
    run: str
    """The first eight hex digits of the run's id."""
    run_id: str
    rejected: list[str]
    """Sentences about newer checkpoints that were rejected."""


def train_run(run_dir: Path, ranks: Ranks, times: LaunchTimes, console: IO[str] = sys.stdout) -> int:
    """Train this rank's part of the run in `run_dir` until it is done or stopped on request; returns the exit code."""
    config = read_config(run_dir)
    if config.engine.deterministic:
        use_deterministic_kernels()
    stop_requested = stop_requests(run_dir, ranks.rank)
    fetches_shards = (
        REMOTE_RUN in os.environ and config.data is not None and config.data.shuffle_window_shards is not None
    )
    shard_request_dir = run_dir if fetches_shards else None
    data = open_dataset(run_dir / "data", await_shard if fetches_shards else None)
    lock = _lock(run_dir) if ranks.rank == 0 else None
    check_installed(ranks)
    resume = _resolve_resume(run_dir, config, data, ranks)
    times.lap("check_s")

    rate = matmul_rate(ranks.device, DTYPES[config.engine.precision])
    share_of_node = 1 / int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    peak = peak_rate(ranks.device, config.engine.precision, rate)
    totals = ranks.all_reduce_sum({"peak": peak, "nodes": share_of_node})
    peak_flops = totals["peak"]
    sizes = micro_batch_sizes(config, run_dir, ranks, shard_request_dir)
    batches = BatchBuilder.open(
        config, run_dir / "data", run_dir / "index", ranks.rank, ranks.world_size, sizes, shard_request_dir
    )
    loaded = load_engine(config, run_dir, data.manifest, ranks, max(sizes), resume.step)
    check_state = _state_check(config, data, ranks, loaded)
    check_state(loaded.state)
    journal = _journal(run_dir) if ranks.rank == 0 and REMOTE_RUN in os.environ else None
    writer = _checkpoint_writer(run_dir, config, ranks, resume, journal)
    writer.prepare(loaded.engine.state()[0])

    if ranks.rank == 0:
        truncate_torn_line(run_dir / "metrics.jsonl")
        times.lap("restore_s")
        first_step = max(0, resume.step)
        nodes = round(totals["nodes"])
        path, rejected = run_dir / "launches.jsonl", resume.rejected
        append_launch(path, ranks, nodes, resume.launch, first_step, rejected, rate, sizes, config, times)
    last = min(total_steps(config.phases), int(os.environ.get(LAST_STEP, sys.maxsize)))
    tracer = Tracer(run_dir / "logs", ranks.rank)
    with ExitStack() as stack:
        metrics = stack.enter_context(TextIOWrapper(open_append(run_dir / "metrics.jsonl")))
        if journal is not None:
            stack.callback(journal.close)
        hooks = Hooks(
            emit=metrics_writer(metrics, console) if ranks.rank == 0 else _ignore,
            check_replicas=check_state,
            save=_saver(config, data, ranks, loaded, writer, metrics, resume.run_id),
            record_skipped=skipped_writer(run_dir / "skipped.jsonl", batches) if ranks.rank == 0 else _ignore,
            heartbeat=watchdog(config.engine.hang_timeout_s),
            stop_requested=stop_requested,
            trace_requested=lambda: read_trace_request(run_dir / "trace") if ranks.rank == 0 else 0,
            trace=tracer.before_step,
        )
        try:
            finished = train(loaded.engine, batches, loaded.state, hooks, last, peak_flops)
        except (FloatingPointError, InconsistentStateError):
            # They are raised on all ranks at once. The save in progress must not be lost.
            writer.wait()
            ranks.broadcast(0)  # no rank exits before rank 0 has committed
            raise
        tracer.finish()
        writer.wait()
    if not finished:
        log.warning(
            "stopped on request after saving, by a signal or by %s; remove that file, if there is one, and rerun the "
            "same command to resume",
            run_dir / STOP_FILE,
        )
    ranks.broadcast(0)  # no rank exits before rank 0 has committed
    faulthandler.cancel_dump_traceback_later()
    loaded.engine.destroy()
    if lock is not None:
        lock.release()
    return DONE if finished else STOPPED


def _resolve_resume(run_dir: Path, config: TrainingConfig, data: TokenDataset, ranks: Ranks) -> _Resume:
    """Find the newest good checkpoint; rank 0 also removes what was never committed, and builds the sample indexes."""
    checkpoints, launch, run_id = checkpoints_of(run_dir, config), secrets.randbits(32), ""
    if ranks.rank == 0:
        if REMOTE_RUN not in os.environ:
            # For a run in an object store the driver checks this, because a node's copy may have rows of a removed run.
            check_checkpoints_exist(run_dir, checkpoints)
        run_id = claim_checkpoints(run_dir, checkpoints, os.environ.get(REMOTE_RUN))
    saved, rejected = newest_good_shared(checkpoints, ranks)
    if saved:
        check_steps_left(run_dir, config, saved.step)

    def sweep_and_build() -> None:
        swept = sweep(checkpoints, saved.step if saved else None, f"{run_id[:8]}-{launch:08x}")
        for sentence in rejected + swept:
            log.warning(sentence)
        if SUPERVISED not in os.environ:  # else the driver has built them
            build_indexes(run_dir / "index", data, config)
            build_word_vectors(run_dir / "index", data, config.model)

    ranks.run_on_rank_zero(sweep_and_build)
    launch = ranks.broadcast(launch)
    run = ranks.broadcast(int(run_id[:8] or "0", 16))
    return _Resume(saved.step if saved else -1, f"{launch:08x}", f"{run:08x}", run_id, rejected)


def _journal(run_dir: Path) -> JournalWriter:
    """A writer that uploads rank 0's rows to the object store; rows before a save are uploaded before its commit."""
    truncate_torn_line(run_dir / "metrics.jsonl")
    return JournalWriter(open_folder(f"{os.environ[REMOTE_RUN]}/{JOURNAL}"), int(os.environ[LAUNCH]), run_dir, ROWS)


def _checkpoint_writer(
    run_dir: Path, config: TrainingConfig, ranks: Ranks, resume: _Resume, journal: JournalWriter | None
) -> CheckpointWriter:
    return CheckpointWriter(
        checkpoints_of(run_dir, config),
        ranks.rank,
        ranks.world_size,
        f"{resume.run}-{resume.launch}",
        config.checkpoint.keep,
        config.checkpoint.keep_every,
        needed=lambda: steps_of_audits(run_dir, config),
        before_commit=journal.flush if journal else _ignore,
    )


def _saver(
    config: TrainingConfig,
    data: TokenDataset,
    ranks: Ranks,
    loaded: LoadedEngine,
    writer: CheckpointWriter,
    metrics: IO[str],
    run_id: str,
) -> Callable[[TrainState], None]:
    def save(progress: TrainState) -> None:
        if ranks.rank == 0:
            sync_metrics(metrics)
        tensors, updates, counters = loaded.engine.state()
        manifest = CheckpointManifest(
            run=run_id or None,
            step=progress.step,
            tokens=progress.tokens,
            updates=updates,
            skipped=progress.skipped,
            skipped_in_a_row=progress.skipped_in_a_row,
            counters=counters,
            world_size=ranks.world_size,
            zero_stage=config.engine.zero_stage,
            parameters={name: list(shape) for name, shape in loaded.engine.parameters.items()},
            files=[],
            recipe=recorded_part(config),
            data_fingerprint=data.manifest.fingerprint,
            tokenizer_sha256=data.manifest.tokenizers_sha256,
            parent=loaded.parent,
            mlflow_run_id=os.environ.get(MLFLOW_RUN_ID),
        )
        writer.save(tensors, manifest)

    return save


def _state_check(
    config: TrainingConfig, data: TokenDataset, ranks: Ranks, loaded: LoadedEngine
) -> Callable[[TrainState], Row]:
    of_run = {"recipe": sha256_json(config.model_dump(mode="json")), "data": data.manifest.fingerprint}

    interval = config.engine.replica_check_interval

    def check(progress: TrainState) -> Row:
        engine = loaded.engine
        changed = engine.changed_hyperparameters()
        facts = {**of_run, **asdict(progress), **engine.metrics(), "changed hyperparameters": changed}
        if ranks.world_size > 1:
            check_replicas(ranks, engine.replicated_tensors(), facts, progress.step)
        if changed:
            raise InconsistentStateError(
                f"the optimizer does not have the recipe's hyperparameters after step {progress.step}: "
                f"{', '.join(changed)}; nothing was saved since then, and a rerun resumes from the newest checkpoint"
            )
        if interval is None or progress.step % interval != 0:
            return {}
        return {STATE_CHECKSUMS: state_checksums(ranks, engine.state_names, engine.state()[0])}

    return check


def _lock(run_dir: Path) -> FileLock:
    """Acquire the lock that rank 0 holds while it writes to `run_dir`."""
    lock = FileLock(run_dir / "worker.lock", timeout=_LOCK_TIMEOUT_S)
    try:
        lock.acquire()
    except Timeout:
        raise TimeoutError(
            f"another training process has held the lock of {run_dir} for {_LOCK_TIMEOUT_S:.0f} s; end it first"
        ) from None
    return lock


def _ignore(*_: object) -> None:
    """Replaces hooks on ranks that do not write."""
