"""Processes of a job on this host, and the programs that kill them and that print a log while they run."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .run_files import read

OFFSET_PREFIX = "multihop log offset "
_POLL_S, _REMOTE_POLL_S = 1.0, 5.0


def kill(variable: str, job_id: str) -> None:
    """Kill the processes of a job.

    Args:
        variable: environment variable that holds a job's id.
    """
    killed = 0
    for process in processes_with(variable, job_id):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
            killed += 1
    print(f"killed {killed} processes", flush=True)


def print_log(run: str, rank: str, start: str, variable: str = "", job_id: str = "", most_seconds: str = "0") -> None:
    """Print a rank's log from a byte offset on, then a line with the offset that was reached.

    Given the id of a job, follow the log while processes of that job are alive on this host, for a limited time: the
    client may have ended.

    Args:
        run: the run's directory or its s3:// URI.
        start: byte offset in the log.
        variable: environment variable that holds a job's id.
        most_seconds: the longest time to follow the log.
    """
    name, offset = f"logs/rank-{rank}.log", int(start)
    deadline = time.monotonic() + float(most_seconds)
    while True:
        goes_on = job_id != "" and time.monotonic() < deadline and any(processes_with(variable, job_id))
        content = read(run, name, offset)
        if content is None and not job_id:
            sys.exit(f"{run}/{name} does not exist")
        whole = content or b""
        if job_id:
            whole = whole[: whole.rfind(b"\n") + 1]  # an incomplete line is read again
        offset += len(whole)
        text = whole.decode(errors="replace")  # Ray forwards only UTF-8
        sys.stdout.buffer.write((text if text.endswith("\n") or not text else f"{text}\n").encode())
        sys.stdout.flush()
        if not goes_on:
            print(f"{OFFSET_PREFIX}{offset}", flush=True)
            return
        time.sleep(_REMOTE_POLL_S if run.startswith("s3://") else _POLL_S)


def processes_with(variable: str, value: str) -> Iterator[int]:
    """Yield the ids of the processes in whose environment `variable` has this value: a job's command and all
    descendants have the job's id in their environment."""
    wanted = f"{variable}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it has ended
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
