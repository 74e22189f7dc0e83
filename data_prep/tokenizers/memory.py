"""How much memory a process can still allocate."""

from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Free bytes on this machine within the limits of the process's control groups, version 1 or 2.

    Args:
        root: the directory of proc/ and sys/.
    """
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    free = [int(lines["MemAvailable"].split()[0]) * 1024]
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
            free += _left(folder / limit, folder / used, folder / "memory.stat")
    return max(min(free), 0)


def _left(limit: Path, used: Path, stat: Path) -> list[int]:
    """One number; none if the group has no limit. Cached files do not count: the kernel reclaims them."""
    if not limit.exists() or limit.read_text().strip() == "max":
        return []
    counts = dict(line.split() for line in stat.read_text().splitlines())
    cached = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return [int(limit.read_text()) - int(used.read_text()) + cached]
