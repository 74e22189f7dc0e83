"""The machine of a process: its processor, the memory that it can still allocate, and glibc's malloc."""

import ctypes
import platform
from functools import cache
from pathlib import Path

import numpy as np

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1


def cpu_model() -> str:
    """Return the model name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def disable_malloc_trim() -> None:
    """Make glibc keep all freed memory for later allocations; for a process that trains or generates text.

    Each step frees and allocates the same large blocks; fresh pages are zeroed at their first touch, which takes 5 to
    7 % of a step on a CPU (bench/README.md).
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


@cache
def raise_mmap_threshold() -> None:
    """Make glibc reuse freed blocks of up to 32 MiB; for the preparation's workers, which should not keep more.

    Fresh pages take a third of the time of finding near duplicates and about a twentieth of encoding. glibc raises its
    threshold to the size of any mapped block that is freed and then keeps up to twice as much (mallopt(3),
    M_MMAP_THRESHOLD), here 64 MiB. No page of the array below is touched.
    """
    np.empty(2**25 - 2**14, np.uint8)


def available_memory(root: Path = Path("/")) -> int:
    """Return the free bytes on this machine within the limits of the process's control groups, version 1 or 2.

    Args:
        root: the directory of proc/ and sys/.
    """
    free = [_meminfo(root, "MemAvailable"), *(limit - used for limit, used in _control_groups(root))]
    return max(min(free), 0)


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of this machine's memory, or the smallest limit of the process's control groups.

    Args:
        root: as in `available_memory`.
    """
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _control_groups(root))])


def _meminfo(root: Path, name: str) -> int:
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _control_groups(root: Path) -> list[tuple[int, int]]:
    """Return the limit and the used bytes of each control group of this process that has a limit."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # The limits of all parent groups apply too. In a container the path may be the host's, and only `top` exist.
        inner = Path(group.lstrip("/"))
        for folder in {top, *(top / each for each in (inner, *inner.parents))}:
            if (folder / limit).exists() and (folder / limit).read_text().strip() != "max":
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
                # Cached files do not count: the kernel reclaims them.
                found.append((int((folder / limit).read_text()), int((folder / used).read_text()) - cached))
    return found
