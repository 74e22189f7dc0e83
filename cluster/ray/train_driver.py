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
from multihop.cluster.ray import TrainingFailed
from multihop.cluster.ray.capacity import Capacity, ScaleUpPolicy
from multihop.cluster.ray.rank import run_rank
from multihop.cluster.ray.slow_start import SLOW_S, kill_controllers, ranks_have_processes, why_ranks_wait
from multihop.cluster.ray.standby import StandbyWorkers
from multihop.cluster.ray.watch import (
    NODE_ID,
    Watch,
    abandon_ranks,
    draining_nodes,
    ranks_by_node,
    unreachable_nodes,
    watch_nodes,
)
from multihop.cluster.remote.driver_mailbox import DriverMailbox
from multihop.cluster.remote.node_cache import LOST_FILE, RemoteRunSpec, log_of
from multihop.common.errors import USER_ERROR, UserError
from multihop.common.files import read_json_object, write_atomically
from multihop.common.json_lines import RowFollower
from multihop.pretrain.checkpoint.verify import newest_step
from multihop.pretrain.environment import TIMES
from multihop.pretrain.run.files import GAVE_UP, RESTART_FILE, STOP_FILE

_POLL_S = 0.5
_LONGEST_REASON = 160
_RESTARTS = 3
"""Consecutive restarts without a new checkpoint before the run fails."""
_LAST_WORDS_S = 2.0
"""Seconds in which the remaining ranks end when nodes are lost; nodes of a remote run upload their logs meanwhile."""
_ABANDONED_S = 10.0
"""Seconds in which Ray Train's thread ends once its controller is killed. If it called Ray after Ray is shut down, Ray
would end this process with an error."""
_SAME_SIGNAL_S = 1.0
"""Seconds within which a second signal counts as the first: `timeout` signals the command and then its group."""
_STANDBYS_FROM_S = 300.0
"""Least remaining seconds of a run for which standby processes are worth their memory and the seconds of a core."""


def train_on_ray(
    run_dir: Path,
    checkpoints: str,
    last_step: int,
    workers: tuple[int, int],
    environment: dict[str, str],
    required_variables: Sequence[str],
    on_row: Callable[[dict[str, Any]], None],
    remote: RemoteRunSpec | None = None,
) -> bool:
    """Train the run in `run_dir` to its last step, or until a signal stops it; the newest checkpoint shows which.

    The number of ranks, within `workers`, is what fits on the cluster beside other jobs. Ranks that fail are restarted
    from the newest checkpoint as soon as there is room for the least number of them. When there is room for more, and
    the rest of the run repays a restart, the ranks save and are restarted with more. When one of their nodes is about
    to be removed, they save and are restarted without it.

    Args:
        checkpoints: location of the run's checkpoints.
        last_step: after it the run is done.
        workers: the least and the greatest number of ranks.
        environment: environment variables for the ranks.
        required_variables: names of environment variables that every node must have.
        on_row: called with each new row of metrics.jsonl.
        remote: the run in an object store, if the nodes share no folder.

    Returns:
        Whether a stop was requested, which may have been after the last step.

    Raises:
        TrainingFailed: with the last error of the ranks.
        UserError: the ranks found a mistake of the user's.
    """
    run_dir = run_dir.absolute()
    training = _Training(run_dir, checkpoints, last_step, environment, required_variables, on_row, remote)
    stop = training.stop_file
    with stop_file_on_signals(stop), watch_nodes() as watch, Capacity(*workers) as capacity:
        while (group := training.start_group(watch, capacity)) is not None:
            training.supervise(group, watch, capacity)
            if training.is_over(group, capacity):
                break
    shutil.rmtree(run_dir / ".ray-train", ignore_errors=True)
    is_stopped = stop.exists()
    stop.unlink(missing_ok=True)
    return is_stopped


class _Training:
    """The worker groups of one run, one after another, and what the driver keeps between them."""

    def __init__(
        self,
        run_dir: Path,
        checkpoints: str,
        last_step: int,
        environment: dict[str, str],
        required_variables: Sequence[str],
        on_row: Callable[[dict[str, Any]], None],
        remote: RemoteRunSpec | None,
    ) -> None:
        """Remove requests to earlier ranks."""
        self._run_dir, self._checkpoints, self._last_step = run_dir, checkpoints, last_step
        self._environment, self._required_variables = environment, required_variables
        self._on_row, self._remote = on_row, remote
        self.stop_file = run_dir / STOP_FILE
        self._restart_file, self._lost_file = run_dir / RESTART_FILE, run_dir / LOST_FILE
        for file in (self.stop_file, self._restart_file, self._lost_file, run_dir / GAVE_UP):
            file.unlink(missing_ok=True)
        self._mailbox = None if remote is None else DriverMailbox(run_dir, remote)
        self._rows = RowFollower(run_dir / "metrics.jsonl", from_end=True)
        self._scale_up, self._standbys = ScaleUpPolicy(last_step), StandbyWorkers(run_dir)
        self._times: dict[str, float] = {}
        """See `multihop.pretrain.environment.TIMES`."""
        self._step_before: int | None = None
        """Step of the newest checkpoint when the present group was started."""
        self._failures = 0
        """Consecutive failures without a new checkpoint."""

    def start_group(self, watch: Watch, capacity: Capacity) -> "_WorkerGroup | None":
        """Wait until the cluster has room for the ranks, and start them; None if a stop is requested meanwhile."""
        while not (ranks := capacity.room_to_start(excluded := _excluded_nodes(watch))):
            if self.stop_file.exists():
                break
            time.sleep(_POLL_S)
        if self.stop_file.exists():
            return None
        self._step_before = newest_step(self._checkpoints)
        self._times["requested"] = time.time()
        self._scale_up.on_request(time.monotonic())
        config = {
            "run_dir": str(self._run_dir),
            "remote": self._remote and asdict(self._remote),
            "launch": self._mailbox and self._mailbox.next_launch(),
            "environment": self._environment | {TIMES: json.dumps(self._times)},
            "required_variables": list(self._required_variables),
            "standbys": self._standbys.ready(),
        }
        group = _WorkerGroup(config, ranks, capacity.kind, excluded)
        group.start()
        return group

    def supervise(self, group: "_WorkerGroup", watch: Watch, capacity: Capacity) -> None:
        """Poll until the ranks have ended: pass on rows, and request restarts for lost, leaving and new nodes."""
        has_begun, has_standbys, lost_at = False, False, math.inf
        printed_at = started_at = time.monotonic()
        while group.is_alive() and time.monotonic() - lost_at < _LAST_WORDS_S:
            group.join(_POLL_S)
            if self._mailbox:
                self._mailbox.poll()
            unresponsive, leaving = watch.unresponsive(), draining_nodes()
            room = capacity.room(unresponsive | leaving)
            if unresponsive and self._end_lost_ranks(group, unresponsive):
                lost_at = time.monotonic()
            is_ending = self.stop_file.exists() or self._restart_file.exists()
            if leaving and not is_ending and leaving & ranks_by_node().keys():
                self._request_restart("a node is about to be removed: the ranks save and restart without it")
            has_begun |= self._pass_on_rows()
            if not has_begun and self.stop_file.exists() and not ranks_have_processes():
                break
            if not has_begun and time.monotonic() - printed_at >= SLOW_S:
                printed_at = time.monotonic()
                self._print_slow_start(group.ranks, printed_at - started_at)
            if not has_standbys and self._scale_up.remaining_s() > _STANDBYS_FROM_S:
                self._standbys.start_on(ranks_by_node().keys() - unresponsive)
                has_standbys = True
            if capacity.kind != group.kind and room and not is_ending:
                self._request_restart(f"nodes with {capacity.kind}s have joined: the ranks restart on them")
            elif self._scale_up.is_worth_restart(group.ranks, room, time.monotonic()) and not is_ending:
                self._request_restart(f"the cluster has room for {room} ranks instead of {group.ranks}: they restart")
        if group.is_alive():
            abandon_ranks()
            if self.stop_file.exists():
                error = group.error
                kill_controllers()
                group.join(_ABANDONED_S)
                group.error = error  # that its controller was killed is no failure
        if self._mailbox:
            self._mailbox.end()

    def is_over(self, group: "_WorkerGroup", capacity: Capacity) -> bool:
        """Return whether the training is over after a group has ended; if not, print why the ranks are restarted.

        Raises:
            TrainingFailed: the ranks failed too often without a new checkpoint.
            UserError: the ranks found a mistake of the user's.
        """
        _raise_if_given_up(self._run_dir)
        self._times["ended"] = time.time()
        step, is_restart = newest_step(self._checkpoints), self._restart_file.exists()
        for file in (self._restart_file, self._lost_file):
            file.unlink(missing_ok=True)
        if group.was_not_placed():
            capacity.on_placement_failure(group.ranks)
            return False
        if group.error is None and is_restart and step != self._last_step:
            return False
        if group.error is None and (self.stop_file.exists() or step == self._last_step):
            return True
        reason = _reason(group.error) if group.error else "one of them received SIGTERM"
        if self.stop_file.exists():
            console.print(f"the ranks failed ({reason}) before they saved a checkpoint after step {step}")
            return True
        self._failures = self._failures + 1 if step == self._step_before else 0
        if self._failures > _RESTARTS:
            raise TrainingFailed(
                f"the ranks failed {self._failures} times without a new checkpoint: {reason}; see {self._run_dir}/logs"
            )
        console.print(f"{clock()} the ranks failed ({reason}); restarting from step {step or 0}")
        return False

    def _end_lost_ranks(self, group: "_WorkerGroup", unresponsive: Set[str]) -> bool:
        """Have the ranks end at once if some of their nodes are unresponsive; returns whether it was requested now."""
        lost = unresponsive & ranks_by_node().keys()
        if self._lost_file.exists() or not lost:
            return False
        group.error = RuntimeError(f"{len(lost)} of its nodes stopped responding")
        write_atomically(self._lost_file, str(group.error).encode())
        return True

    def _request_restart(self, reason: str) -> None:
        """Have the ranks save a checkpoint and end, to be restarted."""
        console.print(f"{clock()} {reason}")
        write_atomically(self._restart_file, b"")

    def _pass_on_rows(self) -> bool:
        """Pass new rows of metrics.jsonl on; returns whether there were any."""
        has_rows = False
        for row in self._rows.read():
            has_rows = True
            self._times["last_row"] = row.get("time", self._times["requested"])
            self._scale_up.observe(row, time.monotonic())
            self._on_row(row)
        return has_rows

    def _print_slow_start(self, ranks: int, seconds: float) -> None:
        reason = why_ranks_wait(ranks, None if self._remote else log_of(self._run_dir, 0))
        console.print(f"{clock()} no step for {seconds:.0f} s: {reason}")


def _excluded_nodes(watch: Watch) -> set[str]:
    """Return the ids of the nodes on which no rank should be placed."""
    return draining_nodes() | (watch.unresponsive() or unreachable_nodes())


class _WorkerGroup(threading.Thread):
    """A thread that runs Ray Train, because the main thread handles signals."""

    def __init__(self, config: dict[str, Any], ranks: int, kind: str, excluded: Set[str]) -> None:
        super().__init__(daemon=True)
        self.ranks, self.kind = ranks, kind
        self._config = config
        # Ray may report a lost node as alive for another minute.
        self._label_selector = {NODE_ID: f"!in({','.join(sorted(excluded))})"} if excluded else None
        self.error: Exception | None = None

    def run(self) -> None:
        from ray.train import RunConfig
        from ray.train.v2.api.config import FailureConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        trainer = DataParallelTrainer(
            run_rank,
            train_loop_config=self._config,
            scaling_config=ScalingConfig(
                num_workers=self.ranks, use_gpu=self.kind == "GPU", label_selector=self._label_selector
            ),
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
        """Return whether Ray could not place the ranks, although the cluster seemed to have room."""
        failure = getattr(self.error, "controller_failure", None)
        return type(failure).__name__ == "WorkerGroupStartupTimeoutError"


def _raise_if_given_up(run_dir: Path) -> None:
    """Raise the error of gave-up.json, which ranks write if a restart would fail too."""
    if (run_dir / GAVE_UP).exists():
        reason = read_json_object(run_dir / GAVE_UP, advice="see the ranks' logs beside it")
        raise UserError(reason["message"]) if reason["code"] == USER_ERROR else TrainingFailed(reason["message"])


@contextmanager
def stop_file_on_signals(stop_file: Path) -> Iterator[None]:
    """The first signal asks the ranks to finish their step, save and exit; the second ends this process at once."""
    received: list[float] = []  # the file is no evidence: it may have been created before the first signal

    def request_stop(number: int, frame: object) -> None:
        if received:
            if time.monotonic() - received[0] > _SAME_SIGNAL_S:
                os._exit(128 + number)
            return
        received.append(time.monotonic())
        write_atomically(stop_file, b"")  # replaces a link of this name
        print("\nstopping after this step; repeat to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(error: Exception) -> str:
    """Return the last line of each rank's error, which in a traceback is the message; duplicates are dropped."""
    errors = getattr(error, "worker_failures", None) or {0: error}
    lines = (str(each).strip().splitlines()[-1] for each in errors.values())
    return "; ".join(dict.fromkeys(textwrap.shorten(line, _LONGEST_REASON, placeholder=" …") for line in lines))
