"""Pretraining under Ray Train, which places the ranks and restarts them, and nothing more.

What the ranks have to say they write to the run directory; no checkpoint is reported to Ray, which would copy it.
"""

import json
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.nodes import Nodes
from cluster.progress import clock, console
from cluster.rank import run_rank
from cluster.rows import RowFollower
from data_prep.files import read_json_object, write_atomically
from pretrain.checkpoint import newest_step
from pretrain.run_files import GAVE_UP
from pretrain.starting import TIMES

_POLL_S = 0.5
_LONGEST_REASON = 160
_RESTARTS = 3
"""How often in a row the ranks are started again without a new checkpoint before the run is given up."""


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

    Ranks that end before are started again, from the newest checkpoint and as soon as the cluster has room for them.

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
    nodes = Nodes(workers)
    times: dict[str, float] = {}
    failures = 0
    with _stop_file_on_signals(run_dir / "stop"):
        while True:
            while nodes.are_missing() and not (run_dir / "stop").exists():
                time.sleep(_POLL_S)
            before = newest_step(checkpoints)
            times["asked"] = time.time()
            gang = _Gang(run_dir, workers, environment | {TIMES: json.dumps(times)})
            gang.start()
            while gang.is_alive():
                gang.join(_POLL_S)
                nodes.are_missing()
                for row in rows.read():
                    times["silent"] = row.get("time", times["asked"])
                    on_row(row)
            if (run_dir / GAVE_UP).exists():
                reason = read_json_object(run_dir / GAVE_UP, advice="see the ranks' logs beside it")
                raise ValueError(reason["message"]) if reason["code"] == 2 else TrainingFailed(reason["message"])
            if gang.error is None:
                break
            times["ended"] = time.time()
            step = newest_step(checkpoints)
            if (run_dir / "stop").exists():
                console.print(f"the ranks ended ({_reason(gang.error)}) before they had saved what came after {step}")
                break
            failures = failures + 1 if step == before else 0
            if failures > _RESTARTS:
                raise TrainingFailed(
                    f"the ranks ended {failures} times without a new checkpoint: {_reason(gang.error)}; see "
                    f"{run_dir}/logs"
                )
            console.print(f"{clock()} the ranks ended ({_reason(gang.error)}); they start again from step {step or 0}")
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
                # Ray Train would not say that the ranks ended, nor know whether they had got any further before.
                failure_config=FailureConfig(max_failures=0),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            self.error = error


@contextmanager
def _stop_file_on_signals(stop_file: Path) -> Iterator[None]:
    """A signal asks the ranks to finish their step, save and leave; a second one ends this process at once."""
    received: list[int] = []  # not the file, which somebody may have made before the first signal

    def ask(number: int, frame: object) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        write_atomically(stop_file, b"")  # in the place of a link that stands there
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(error: Exception) -> str:
    """The last line of what each rank's actor raised, which of a traceback says why; those that say the same, once."""
    raised = getattr(error, "worker_failures", None) or {0: error}
    lines = (str(each).strip().splitlines()[-1] for each in raised.values())
    return "; ".join(dict.fromkeys(textwrap.shorten(line, _LONGEST_REASON, placeholder=" …") for line in lines))
