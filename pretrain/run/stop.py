"""Requests to stop: SIGTERM or SIGINT to any rank, or a file `stop` in the run directory."""

import signal
from collections.abc import Callable
from pathlib import Path

STOP_FILE = "stop"


def stop_requests(run_dir: Path, rank: int) -> Callable[[], bool]:
    """Handle SIGTERM and SIGINT from now on; call the result to ask whether the run should save and exit.

    The loop shares every rank's answer with all ranks, so only rank 0 looks for the file.
    """
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    stop_file = run_dir / STOP_FILE
    return lambda: bool(received) or (rank == 0 and stop_file.exists())
