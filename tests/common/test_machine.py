from pathlib import Path

import pytest

from multihop.common.machine import available_memory, total_memory

MB = 2**20


def write(root: Path, group: str, files: dict[str, str], meminfo_mb: int = 8000) -> Path:
    """Write a root with one memory-limited control group, the folder `group`, and `meminfo_mb` MB of free memory."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 16000000 kB\nMemAvailable: {meminfo_mb * 1024} kB\n")
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content + "\n")
    return root


def test_of_this_machine() -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 2**24 < available_memory() < total and total_memory() <= total


@pytest.mark.parametrize("group", ["", "work", "work/job"])
def test_version_2_with_a_limit_at_any_height(tmp_path: Path, group: str) -> None:
    limits = {"memory.max": str(500 * MB), "memory.current": str(300 * MB), "memory.stat": f"inactive_file {50 * MB}"}
    root = write(tmp_path, group, limits)
    (root / "proc/self/cgroup").write_text("0::/work/job\n")
    assert available_memory(root) == 250 * MB and total_memory(root) == 500 * MB
    write(tmp_path, group, {"memory.max": "max"})
    assert available_memory(root) == 8000 * MB and total_memory(root) == 16_000_000 * 1024
    write(tmp_path, group, {"memory.max": str(200 * MB)})
    assert available_memory(root) == 0


def test_version_1_with_a_path_of_the_host(tmp_path: Path) -> None:
    limits = {"memory.limit_in_bytes": str(500 * MB), "memory.usage_in_bytes": str(300 * MB)}
    root = write(tmp_path, "memory", limits | {"memory.stat": f"cache 1\ntotal_inactive_file {10 * MB}"})
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/1234\n0::/\n")
    assert available_memory(root) == 210 * MB
    write(tmp_path, "memory", {"memory.limit_in_bytes": str(2**63 - 4096)})
    assert available_memory(root) == 8000 * MB
