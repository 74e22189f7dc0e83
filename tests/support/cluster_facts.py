"""A report of a healthy cluster, for tests to change."""

from itertools import pairwise
from typing import Any

GPU = {
    "index": 0,
    "name": "NVIDIA A100-SXM4-80GB",
    "uuid": "GPU-0",
    "driver": "550.54.15",
    "memory_total": 81920 * 2**20,
    "memory_used": 512 * 2**20,
    "temperature": 34,
    "uncorrected_errors": 0,
    "throttle_reasons": 1,
    "pcie_width": [16, 16],
}


def healthy(names: tuple[str, ...] = ("one", "two", "three"), gpu: bool = False) -> dict[str, Any]:
    """Return the report of a healthy cluster of these nodes; the first one is the head."""
    pairs = [[name] for name in names] + [list(pair) for pair in pairwise(names)]
    return {
        "nodes": {name: _node(name, name == names[0], gpu) for name in names},
        "links": [{"nodes": pair, "rates": {"4096": 1e7, "67108864": 1e9}} for pair in pairs],
        "lost": [],
        "needs": {"ranks": len(names), "gpu": gpu},
        "tracking": {"seconds": 0.1},
    }


def _node(name: str, is_head: bool, gpu: bool) -> dict[str, Any]:
    place = {
        "write_rate": 5e8,
        "created": is_head,
        "compares": True,
        "read_rate": 5e8,
        "same": True,
        "owner": "a",
        "read_of": "?",
    }
    devices = [{"name": "a processor", "flops": 2e11, "wrong": 0}]
    facts: dict[str, Any] = {
        "address": name,
        "is_head": is_head,
        "cpus": 8.0,
        "gpus": 1 if gpu else 0,
        "free": {"cpus": 8, "gpus": 1 if gpu else 0},
        "machine": {
            "versions": {"python": "3.11.9", "torch": "2.13.0", "mlflow": None},
            "code": "c" * 64,
            "missing_variables": [],
            "cpus": 8,
            "load": 0.1,
            "open_files": 65536,
            "memory": {"total": 64 * 10**9, "available": 60 * 10**9},
            "shm": {"total": 32 * 10**9, "free": 31 * 10**9},
            "disks": [{"path": "/tmp", "total": 10**12, "free": 5 * 10**11}],
        },
        "clock": {"ahead": 0.01, "uncertainty": 0.005},
        "compute": {"cuda": "12.8", "nccl": "2.27.3", "devices": devices},
        "stores": {"/runs": place | {"node_file": "a" if is_head else "b"}},
    }
    if gpu:
        facts |= {key: {"gpus": [dict(GPU)], "xids": []} for key in ("gpus_idle", "gpus_after_work")}
    return facts
