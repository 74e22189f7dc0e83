"""The hooks of the training loop, and the watchdog, stop requests and profiler traces behind them.

A stop is requested by SIGTERM or SIGINT to any rank, or by a file `stop` or `restart` in the run directory. A profiler
trace of some steps is requested while a run is training: `echo 3 > RUN_DIR/trace`.
"""

import faulthandler
import logging
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from multihop.common.files import atomic_replace, open_regular
from multihop.common.json_lines import Row
from multihop.pretrain.checkpoint.manifest import TrainState
from multihop.pretrain.run.files import RESTART_FILE, STOP_FILE

_MAX_REQUEST_BYTES = 64
"""Bytes of a trace request to read."""

log = logging.getLogger("multihop")


@dataclass(frozen=True)
class Hooks:
    """The functions that the training loop calls to report and to check for requests."""

    emit: Callable[[Row], None]
    """Writes a row of metrics; called on every rank."""
    check_replicas: Callable[[TrainState], Row]
    """Checks that the ranks agree; called on every rank, before each save and as often as the recipe asks. Returns what
    is to be logged."""
    save: Callable[[TrainState], None]
    """Saves a checkpoint; called on every rank."""
    record_skipped: Callable[[int, Row], None]
    """Records the number and the losses of a step that was skipped because it was not finite or had no token to
    predict; called on every rank."""
    heartbeat: Callable[[], None]
    """Resets the watchdog."""
    stop_requested: Callable[[], bool]
    """Whether this rank was asked to save and exit."""
    trace_requested: Callable[[], int]
    """The number of steps that this rank was asked to trace since the last call."""
    trace: Callable[[int], None]
    """Called before each step on all ranks, with the number of steps to trace from it on; 0: no new request."""


def watchdog(timeout_s: float) -> Callable[[], None]:
    """Start a timer, and return a function that resets it; when it expires, the process dumps all stacks and exits.

    The timer is a native thread, which a deadlock in Python does not stop. One stuck rank makes all others wait, so all
    ranks dump their stacks; the driver restarts them.
    """

    def heartbeat() -> None:
        faulthandler.dump_traceback_later(timeout_s, exit=True)

    heartbeat()
    return heartbeat


def stop_requests(run_dir: Path, rank: int) -> Callable[[], bool]:
    """Handle SIGTERM and SIGINT from now on; the result is a function that returns whether to save and exit.

    The loop shares every rank's answer with all ranks, so only rank 0 checks for the files.
    """
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    files = [run_dir / STOP_FILE, run_dir / RESTART_FILE]
    return lambda: bool(received) or (rank == 0 and any(file.exists() for file in files))


def read_trace_request(request: Path) -> int:
    """Read and remove the file `request`; returns the number of steps to trace, or 0 without a file or valid number."""
    try:
        with open_regular(request) as file:
            text = file.read(_MAX_REQUEST_BYTES)
    except FileNotFoundError:
        return 0
    except IsADirectoryError:
        return 0  # not a request, so it is not removed
    except OSError as error:
        log.warning("%s cannot be read: %s", request, error.strerror)
        text = b""
    try:
        request.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed, so it is ignored: %s", request, error.strerror)
        return 0
    number = re.fullmatch(rb"\s*([0-9]{1,6})\s*", text)
    if number and int(number[1]) > 0:
        return int(number[1])
    log.warning("%s contained %r, expected the number of steps to trace, such as 3", request, text)
    return 0


class Tracer:
    """Traces steps of one rank to a file for chrome://tracing and Perfetto."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._left = folder, rank, 0
        self._profile: profile | None = None
        self._steps_seen = 0

    def before_step(self, requested: int) -> None:
        """Start to trace `requested` steps unless it is 0, continue, or write the trace once it is complete."""
        self._steps_seen += 1
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self.finish()
        if requested and self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile, self._left = profile(activities=activities, record_shapes=True), requested
            self._profile.start()

    def finish(self) -> None:
        """Write the trace in progress, if there is one."""
        if self._profile is not None:
            self._profile.stop()
            path = self._folder / f"trace-rank-{self._rank}-{self._steps_seen:08d}.json"
            with atomic_replace(path) as temporary:
                self._profile.export_chrome_trace(str(temporary))
            log.info("wrote %s", path)
            self._profile = None
