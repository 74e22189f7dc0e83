"""Finds the processes of a job on this host: its command and all descendants have the job's id in their environment."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processes_with(variable: str, value: str) -> Iterator[int]:
    """Ids of the processes in whose environment `variable` has this value."""
    wanted = f"{variable}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it has ended
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
