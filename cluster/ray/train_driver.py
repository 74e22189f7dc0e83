"""Pretraining under Ray Train, which only places the ranks.

The ranks write metrics and checkpoints to the run directory. No checkpoint is reported to Ray, which would copy it.
"""

import json
import math
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multihop.cluster.console import clock, console
from multihop.cluster.ray.driver_mailbox import DriverMailbox
from multihop.cluster.ray.failures import TrainingFailed
from multihop.cluster.ray.node_cache import LOST_FILE, RunHome, log_of
from multihop.cluster.ray.nodes import Nodes
from multihop.cluster.ray.rank import run_rank
from multihop.cluster.ray.scale_up import ScaleUpPolicy
from multihop.cluster.ray.slow_start import SLOW_S, ranks_have_processes, why_ranks_wait
from multihop.cluster.ray.standby import StandbyWorkers
from multihop.cluster.ray.watch import NODE_ID, Watch, abandon_ranks, draining, ranks_by_node, unreachable, watched
from multihop.common.errors import USER_ERROR, UserError
from multihop.common.files import read_json_object, write_atomically
from multihop.common.json_lines import RowFollower
from multihop.pretrain.checkpoint.verify import newest_step
from multihop.pretrain.environment import TIMES
from multihop.pretrain.run.files import GAVE_UP
from multihop.pretrain.run.stop import RESTART_FILE, STOP_FILE

_POLL_S = 0.5
_LONGEST_REASON = 160
_RESTARTS = 3
"""Consecutive restarts without a new checkpoint before the run fails."""
_LAST_WORDS_S = 2.0
"""Ranks whose nodes are there have this long to end when others are lost; a node's log goes to the run's home then."""
_SAME_SIGNAL_S = 1.0
"""`timeout` sends its signal to the command and then to the command's group: what follows so soon is no second one."""
_STANDBYS_FROM_S = 300.0
"""A run with less than this left does not repay the seconds of a core and the memory that standby processes take."""


def train_on_ray(
    run_dir: Path,
    checkpoints: str,
    last_step: int,
    workers: tuple[int, int],
    environment: dict[str, str],
    needed: Sequence[str],
    on_row: Callable[[dict[str, Any]], None],
    home: RunHome | None = None,
) -> bool:
    """Train the run in `run_dir` to its last step, or until a signal stops it; the newest checkpoint shows which.

    The number of ranks, within `workers`, is what fits on the cluster beside other jobs. Ranks that fail are restarted
    from the newest checkpoint as soon as there is room for the least number of them. When there is room for more, and
    the rest of the run repays a restart, the ranks save and are restarted with more. When one of their nodes is about
    to be taken away, they save and are restarted without it.

    Args:
        checkpoints: location of the run's checkpoints.
        last_step: after it the run is done.
        workers: the least and the greatest number of ranks.
        environment: environment variables for the ranks.
        needed: names of variables that their nodes must have.
        on_row: called with each new row of metrics.jsonl.
        home: where the nodes find the run and leave what they tell, if they have no folder in common.

    Returns:
        Whether a stop was requested, which may have been after the last step.

    Raises:
        TrainingFailed: with the last error of the ranks.
        UserError: the ranks found a mistake of the user's.
    """
    run_dir = run_dir.absolute()
    stop, restart, lost = run_dir / STOP_FILE, run_dir / RESTART_FILE, run_dir / LOST_FILE
    for file in (stop, restart, lost, run_dir / GAVE_UP):
        file.unlink(missing_ok=True)
    mailbox = None if home is None else DriverMailbox(run_dir, home)
    rows = RowFollower(run_dir / "metrics.jsonl", from_end=True)
    scale_up, standbys = ScaleUpPolicy(last_step), StandbyWorkers(run_dir)
    times: dict[str, float] = {}
    failures = 0
    with stop_file_on_signals(stop), watched() as watch, Nodes(*workers) as nodes:
        while True:
            while not (ranks := nodes.room_to_start(away := _away(watch))) and not stop.exists():
                time.sleep(_POLL_S)
            if stop.exists():
                break
            before = newest_step(checkpoints)
            times["asked"] = time.time()
            scale_up.on_request(times["asked"])
            start = {
                "run_dir": str(run_dir),
                "home": home and asdict(home),
                "start": mailbox and mailbox.next_start(),
                "environment": environment | {TIMES: json.dumps(times)},
                "needed": list(needed),
                "standbys": standbys.ready(),
            }
            group = _WorkerGroup(start, ranks, nodes.kind, away)
            group.start()
            has_begun, has_standbys, lost_at, told = False, False, math.inf, times["asked"]
            while group.is_alive() and time.time() - lost_at < _LAST_WORDS_S:
                group.join(_POLL_S)
                if mailbox:
                    mailbox.poll()
                unresponsive, leaving = watch.unresponsive(), draining()
                room = nodes.room(unresponsive | leaving)
                if unresponsive and not lost.exists() and (gone := unresponsive & ranks_by_node().keys()):
                    group.error = RuntimeError(f"{len(gone)} of its nodes fell silent")
                    write_atomically(lost, str(group.error).encode())
                    lost_at = time.time()
                asked = stop.exists() or restart.exists()
                if leaving and not asked and leaving & ranks_by_node().keys():
                    console.print(f"{clock()} a node is about to be taken away: the ranks save, and restart without it")
                    write_atomically(restart, b"")
                for row in rows.read():
                    has_begun = True
                    times["silent"] = row.get("time", times["asked"])
                    scale_up.observe(row)
                    on_row(row)
                if not has_begun and stop.exists() and not ranks_have_processes():
                    break
                if not has_begun and time.time() - told >= SLOW_S:
                    told = time.time()
                    waiting = why_ranks_wait(ranks, None if home else log_of(run_dir, 0))
                    console.print(f"{clock()} no step for {told - times['asked']:.0f} s: {waiting}")
                if not has_standbys and scale_up.left_s() > _STANDBYS_FROM_S:
                    standbys.start_on(ranks_by_node().keys() - unresponsive)
                    has_standbys = True
                if scale_up.is_worth_restart(ranks, room, time.time()) and not asked:
                    console.print(f"{clock()} the cluster has room for {room} ranks instead of {ranks}: they restart")
                    write_atomically(restart, b"")
            if group.is_alive():
                abandon_ranks()
            if mailbox:
                mailbox.end()
            _raise_if_given_up(run_dir)
            times["ended"] = time.time()
            step, saved = newest_step(checkpoints), restart.exists()
            for file in (restart, lost):
                file.unlink(missing_ok=True)
            if group.was_not_placed():
                nodes.on_placement_failure(ranks)
                continue
            if group.error is None and saved and step != last_step:
                continue
            if group.error is None and (stop.exists() or step == last_step):
                break
            reason = _reason(group.error) if group.error else "one of them received SIGTERM"
            if stop.exists():
                console.print(f"the ranks failed ({reason}) before they saved a checkpoint after step {step}")
                break
            failures = failures + 1 if step == before else 0
            if failures > _RESTARTS:
                raise TrainingFailed(
                    f"the ranks failed {failures} times without a new checkpoint: {reason}; see {run_dir}/logs"
                )
            console.print(f"{clock()} the ranks failed ({reason}); restarting from step {step or 0}")
    shutil.rmtree(run_dir / ".ray-train", ignore_errors=True)
    is_stopped = stop.exists()
    stop.unlink(missing_ok=True)
    return is_stopped


def _away(watch: Watch) -> set[str]:
    """Ids of the nodes on which no rank should be placed."""
    return draining() | (watch.unresponsive() or unreachable())


class _WorkerGroup(threading.Thread):
    """Runs Ray Train in a thread of its own, because the main thread handles signals."""

    def __init__(self, config: dict[str, Any], workers: int, kind: str, unresponsive: Set[str]) -> None:
        super().__init__(daemon=True)
        self._config, self._workers, self._on_gpu = config, workers, kind == "GPU"
        # Ray may take them for alive for another minute.
        self._where = {NODE_ID: f"!in({','.join(sorted(unresponsive))})"} if unresponsive else None
        self.error: Exception | None = None

    def run(self) -> None:
        from ray.train import RunConfig
        from ray.train.v2.api.config import FailureConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        trainer = DataParallelTrainer(
            run_rank,
            train_loop_config=self._config,
            scaling_config=ScalingConfig(num_workers=self._workers, use_gpu=self._on_gpu, label_selector=self._where),
            run_config=RunConfig(
                name=f"start-{time.time_ns()}",
                storage_path=f"{self._config['run_dir']}/.ray-train",
                # Ray Train would restart silently, and does not know whether there was progress.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            self.error = error

    def was_not_placed(self) -> bool:
        """Whether the room that the cluster had for the ranks was gone or taken when they asked for it."""
        failure = getattr(self.error, "controller_failure", None)
        return type(failure).__name__ == "WorkerGroupStartupTimeoutError"


def _raise_if_given_up(run_dir: Path) -> None:
    """Raise what the ranks say that a restart would not mend."""
    if (run_dir / GAVE_UP).exists():
        reason = read_json_object(run_dir / GAVE_UP, advice="see the ranks' logs beside it")
        raise UserError(reason["message"]) if reason["code"] == USER_ERROR else TrainingFailed(reason["message"])


@contextmanager
def stop_file_on_signals(stop_file: Path) -> Iterator[None]:
    """The first signal asks the ranks to finish their step, save and exit; the second ends this process at once."""
    received: list[float] = []  # the file is no evidence: somebody may have created it before the first signal

    def ask(number: int, frame: object) -> None:
        if received:
            if time.monotonic() - received[0] > _SAME_SIGNAL_S:
                os._exit(128 + number)
            return
        received.append(time.monotonic())
        write_atomically(stop_file, b"")  # replaces a link of this name
        print("\nstopping after this step; repeat to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(error: Exception) -> str:
    """The last line of each rank's error, which in a traceback is the message; duplicates are dropped."""
    raised = getattr(error, "worker_failures", None) or {0: error}
    lines = (str(each).strip().splitlines()[-1] for each in raised.values())
    return "; ".join(dict.fromkeys(textwrap.shorten(line, _LONGEST_REASON, placeholder=" …") for line in lines))
