"""Requests to save and exit: SIGTERM or SIGINT to any rank, or a file `stop` or `restart` in the run directory."""

import signal
from collections.abc import Callable
from pathlib import Path

STOP_FILE = "stop"
RESTART_FILE = "restart"
"""Who writes it starts the ranks again."""


def stop_requests(run_dir: Path, rank: int) -> Callable[[], bool]:
    """Handle SIGTERM and SIGINT from now on; call the result to ask whether the run should save and exit.

    The loop shares every rank's answer with all ranks, so only rank 0 looks for the files.
    """
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    files = [run_dir / STOP_FILE, run_dir / RESTART_FILE]
    return lambda: bool(received) or (rank == 0 and any(file.exists() for file in files))
