"""Pretraining under Ray Train, which places the ranks and restarts them, and nothing more.

Each of its actors runs the worker (`python -m pretrain.worker RUN_DIR`) as a child process that dies with it. What
the ranks have to say they write to the run directory; no checkpoint is reported to Ray, which would copy it.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.rows import RowFollower
from pretrain.checkpoint import newest_step
from pretrain.run_files import GAVE_UP

_POLL_S = 0.5
_RESTARTS = 3
"""How often in a row the ranks may die without a new checkpoint before the run is given up."""
_STOPPED = 75


class TrainingFailed(Exception):
    """The ranks died again and again without getting any further, or said that they would."""


def train_on_ray(
    run_dir: Path,
    checkpoints: str,
    workers: int,
    environment: dict[str, str],
    on_row: Callable[[dict[str, Any]], None],
) -> None:
    """Train the run in `run_dir` to its last step, or until a signal stops it; the checkpoints tell how far it came.

    Args:
        checkpoints: where they stand.
        environment: variables for the ranks.
        on_row: is given each row of metrics.jsonl as it is written.

    Raises:
        TrainingFailed: with what the ranks said last.
        ValueError: the ranks found a mistake of the user's.
    """
    run_dir = run_dir.absolute()
    (run_dir / "stop").unlink(missing_ok=True)
    (run_dir / GAVE_UP).unlink(missing_ok=True)
    rows = RowFollower(run_dir / "metrics.jsonl", from_end=True)
    with _stop_file_on_signals(run_dir / "stop"):
        while True:
            before = newest_step(checkpoints)
            gang = _Gang(run_dir, workers, environment)
            gang.start()
            while gang.is_alive():
                gang.join(_POLL_S)
                for row in rows.read():
                    on_row(row)
            if (run_dir / GAVE_UP).exists():
                reason = json.loads((run_dir / GAVE_UP).read_text())
                raise ValueError(reason["message"]) if reason["code"] == 2 else TrainingFailed(reason["message"])
            if gang.error is None:
                break
            if newest_step(checkpoints) == before:
                raise TrainingFailed(_explain(run_dir, gang.error))
    shutil.rmtree(run_dir / ".ray-train", ignore_errors=True)
    (run_dir / "stop").unlink(missing_ok=True)


class _Gang(threading.Thread):
    """Runs Ray Train beside the main thread, which has to stay free for signals."""

    def __init__(self, run_dir: Path, workers: int, environment: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self._config = {"run_dir": str(run_dir), "environment": environment}
        self._run_dir, self._workers = run_dir, workers
        self.error: Exception | None = None

    def run(self) -> None:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        trainer = DataParallelTrainer(
            run_rank,
            train_loop_config=self._config,
            scaling_config=ScalingConfig(num_workers=self._workers, use_gpu=on_gpu),
            run_config=RunConfig(
                name=f"start-{time.time_ns()}",
                storage_path=str(self._run_dir / ".ray-train"),
                failure_config=FailureConfig(max_failures=_RESTARTS),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            self.error = error


def run_rank(config: dict[str, Any]) -> None:
    """One Ray Train actor's part: run this rank's worker as a child process until it ends.

    Raises:
        RuntimeError: it did not end well; Ray Train restarts all ranks.
    """
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    gave_up = Path(config["run_dir"]) / GAVE_UP
    if gave_up.exists():
        return
    context = train.get_context()
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    host = get_node_ip_address()
    endpoint = broadcast_from_rank_zero({"host": host, "port": _free_port(host)} if rank == 0 else None)
    assert endpoint is not None
    cores = len(os.sched_getaffinity(0))
    sees_one_gpu = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    environment = {
        **os.environ,
        **config["environment"],
        "MULTIHOP_SUPERVISED": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": "0" if sees_one_gpu else str(local_rank),
        "MASTER_ADDR": endpoint["host"],
        "MASTER_PORT": str(endpoint["port"]),
        "OMP_NUM_THREADS": str(max(1, cores // context.get_local_world_size())),
        "GLOO_SOCKET_IFNAME": _interface_of(host),
    }
    child = subprocess.Popen(
        # -P: not from a folder `pretrain` of another version in which the command happened to be given.
        [sys.executable, "-P", "-m", "pretrain.worker", config["run_dir"]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent,
    )
    assert child.stdout is not None
    last_line = ""
    for line in child.stdout:
        last_line = line.strip() or last_line
    code = child.wait()
    if code not in (0, _STOPPED) and not gave_up.exists():
        what = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}: {last_line}"
        raise RuntimeError(f"rank {rank} on {socket.gethostname()} {what}")


def _die_with_parent() -> None:
    """Ask Linux to kill the child when the thread that started it is gone, however that came about."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # Ray blocks SIGINT in its processes, and a child inherits that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _interface_of(host: str) -> str:
    """The network interface with this address: gloo would take the first one, which others may not reach."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    raise RuntimeError(f"no network interface has Ray's address {host}")


@contextmanager
def _stop_file_on_signals(stop_file: Path) -> Iterator[None]:
    """A signal asks the ranks to finish their step, save and leave; a second one ends this process at once."""

    def ask(number: int, frame: object) -> None:
        if stop_file.exists():
            os._exit(128 + number)
        stop_file.touch()
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(run_dir: Path, error: Exception) -> str:
    failures = getattr(error, "worker_failures", None)
    reasons = [str(failure).strip().splitlines()[-1] for failure in failures.values()] if failures else [str(error)]
    return f"the ranks died {_RESTARTS + 1} times without a new checkpoint: {'; '.join(reasons)}; see {run_dir}/logs"
