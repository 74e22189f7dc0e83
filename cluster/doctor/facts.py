"""What one node is: versions, code, memory, disks, limits, clock. Runs on the node, and returns plain values."""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multihop.cluster.jobs.head_scripts.inspect_head import installed, versions


def machine(folders: Sequence[str], variables: Sequence[str]) -> dict[str, Any]:
    """Everything that is read in no time.

    Args:
        folders: report the disks of these too.
        variables: names that should be in the environment.

    Returns:
        versions {package: version, or None}, code (its hash, or None), missing_variables (names), cpus and load (of one
        minute), open_files (the limit), memory {total, available}, shm {total, free} and disks [{path, total, free}], a
        row a file system, in bytes.
    """
    import psutil

    memory = psutil.virtual_memory()
    return {
        "versions": versions(),
        "code": installed(),
        "missing_variables": [name for name in variables if name not in os.environ],
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memory": {"total": memory.total, "available": memory.available},
        "shm": _space("/dev/shm"),
        "disks": _disks([tempfile.gettempdir(), str(Path.home()), *folders]),
    }


def clock() -> float:
    """Seconds since 1970."""
    return time.time()


def _disks(folders: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for folder in folders:
        path = _existing(Path(folder))
        found.setdefault(path.stat().st_dev, {"path": str(path), **_space(path)})
    return list(found.values())


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _space(path: str | Path) -> dict[str, int]:
    usage = shutil.disk_usage(path)  # free: for users other than root
    return {"total": usage.total, "free": usage.free}
