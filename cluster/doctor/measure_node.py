"""Measurements on one node: versions, memory, disks, limits, clock, matrix products, GPUs, all-reduce.

Each function is called on the node and returns plain values.
"""

import csv
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from multihop.cluster.jobs.head_scripts.inspect_head import installed_code, installed_versions
from multihop.cluster.ray.each_node import interface_of
from multihop.common.gpus import nvidia_smi
from multihop.common.machine import available_memory, total_memory

_MATRIX_SIZE, _PRODUCTS = 1024, 20
_TOLERANCE = 1e-5
"""Largest error of a product in float32, relative to the sum of the absolute values of its terms; rounding errors are
about 1e-7 of it."""
_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active",
    "pcie.link.width.max",
    "pcie.link.width.current",
)
_MIB = 2**20
_UNKNOWN = {"[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", "[Insufficient Permissions]"}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
ALL_REDUCE_SIZES = (2**12, 2**20, 2**26)
"""Bytes of the tensors: one for the latency, a small bucket of gradients, a large one."""
ALL_REDUCE_TIMEOUT_S = 120.0
_RENDEZVOUS_TIMEOUT_S = 45.0
"""Seconds for the rendezvous, and for each all-reduce; torch may be imported from a cold disk before."""
_ALL_REDUCE_REPEATS = 5


def measure_machine(folders: Sequence[str], variables: Sequence[str]) -> dict[str, Any]:
    """Read versions, code, memory, disks and limits, which takes no time.

    Args:
        folders: paths whose disks are reported too.
        variables: names of environment variables that should be set.

    Returns:
        versions {package: version, or None}, code (its hash, or None), missing_variables (names), cpus and load (of one
        minute), open_files (the limit), memory {total, available}, shm {total, free} and disks [{path, total, free}], a
        row a file system, in bytes.
    """
    return {
        "versions": installed_versions(),
        "code": installed_code(),
        "missing_variables": [name for name in variables if name not in os.environ],
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memory": {"total": total_memory(), "available": available_memory()},
        "shm": _space("/dev/shm"),
        "disks": _disks([tempfile.gettempdir(), str(Path.home()), *folders]),
    }


def read_clock() -> float:
    """Read this node's clock, in seconds since 1970."""
    return time.time()


def measure_compute(on_gpu: bool) -> dict[str, Any]:
    """Measure how fast each GPU, or the CPU, multiplies matrices, and whether the products are right.

    Returns:
        cuda and nccl (versions, or None), and devices: a row for each of {name, flops (per second), wrong (how many of
        20 products were)}.

    Raises:
        RuntimeError: `on_gpu`, and torch finds no GPU.
    """
    import torch

    from multihop.common.machine import cpu_model

    if on_gpu and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU: compare its CUDA version with the driver's")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    if on_gpu:
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        devices = [_measure_device(torch.device("cuda", number)) | {"name": name} for number, name in enumerate(names)]
    else:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # Ray sets one thread for a task that reserves no CPU
        devices = [_measure_device(torch.device("cpu")) | {"name": cpu_model()}]
    return {"cuda": torch.version.cuda, "nccl": nccl, "devices": devices}


def _measure_device(device: Any) -> dict[str, Any]:
    import torch

    from multihop.pretrain.engine.device import matmul_rate

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"flops": matmul_rate(device, dtype), "wrong": _wrong_products(device)}


def _wrong_products(device: Any) -> int:
    """Return the number of equal products of random matrices that differ from a float64 reference computed on the
    CPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    left, right = left.float().double(), right.float().double()
    reference, sizes = left @ right, left.abs() @ right.abs()
    on_device, factor = left.float().to(device), right.float().to(device)
    return sum(
        not bool((((on_device @ factor).cpu().double() - reference).abs() <= _TOLERANCE * sizes).all())
        for _ in range(_PRODUCTS)
    )


def query_gpus() -> dict[str, Any]:
    """Return each GPU as nvidia-smi describes it, and the Xid messages of the kernel if this user may read them.

    Raises:
        OSError: there is no nvidia-smi.
        RuntimeError: nvidia-smi failed, or did not answer.
    """
    rows = parse_gpus(nvidia_smi(*_FIELDS))
    log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20)
    return {"gpus": rows, "xids": parse_xids(log.stdout) if log.returncode == 0 else None}


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Return rows of nvidia-smi's CSV in the order of the fields above; None for what a GPU does not report.

    Returns:
        index, name, uuid, driver, memory_total and memory_used (bytes), temperature (degrees Celsius),
        uncorrected_errors (of ECC, since the driver was loaded), throttle_reasons (bits of NVML's
        nvmlClocksEventReason), and pcie_width as [now, at most]. An idle GPU lowers its PCIe generation, but not the
        width.
    """
    rows = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        values = dict(
            zip(_FIELDS, (None if value.strip() in _UNKNOWN else value.strip() for value in row), strict=True)
        )
        numbers = {key: None if value is None else _number(value) for key, value in values.items()}
        rows.append(
            {
                "index": numbers["index"],
                "name": values["name"],
                "uuid": values["uuid"],
                "driver": values["driver_version"],
                "memory_total": _bytes(numbers["memory.total"]),
                "memory_used": _bytes(numbers["memory.used"]),
                "temperature": numbers["temperature.gpu"],
                "uncorrected_errors": numbers["ecc.errors.uncorrected.volatile.total"],
                "throttle_reasons": numbers["clocks_event_reasons.active"],
                "pcie_width": [numbers["pcie.link.width.current"], numbers["pcie.link.width.max"]],
            }
        )
    return rows


def parse_xids(text: str) -> list[list[Any]]:
    """Return [PCI address, Xid number] of each kind of message of NVIDIA's driver in the kernel's log, without
    repetitions."""
    return [[address, int(number)] for address, number in dict.fromkeys(_XID.findall(text))]


def _number(text: str) -> int | None:
    """Return a decimal or hexadecimal number; None for other text."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes * _MIB


def all_reduce_rates(rank: int, world_size: int, host: str, node_host: str, port: int, secret: str) -> dict[str, Any]:
    """Sum tensors over all ranks by NCCL where this rank has a GPU, otherwise by gloo.

    Args:
        host: address of rank 0, which listens at `port`.
        node_host: address of this rank's node.
        secret: hexadecimal secret by which the ranks recognize each other.

    Returns:
        {bytes: rate}: the bytes per second that each rank sends, 2 (n - 1) / n of the tensor's in each all-reduce; the
        best of five.

    Raises:
        RuntimeError: a sum is wrong, or a rank did not answer in time.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(node_host)
    import torch
    import torch.distributed as dist

    from multihop.pretrain.engine.rendezvous import Endpoint, Listener, Store

    endpoint = Endpoint(host, port, bytes.fromhex(secret))
    on_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    timeout = timedelta(seconds=_RENDEZVOUS_TIMEOUT_S)
    # Ray uses this process for other tasks, which must not find an open port or group.
    with ExitStack() as stack:
        if rank == 0:
            stack.callback(Listener(endpoint).close)
        store = Store(endpoint, timeout)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        stack.callback(dist.destroy_process_group)
        return {str(size): _rate(size, rank, world_size, device) for size in ALL_REDUCE_SIZES}


def _rate(size: int, rank: int, world_size: int, device: Any) -> float:
    import torch
    import torch.distributed as dist

    seconds = []
    for _ in range(_ALL_REDUCE_REPEATS + 1):  # the first one opens connections
        tensor = torch.full((size // 4,), float(rank + 1), device=device)
        dist.barrier()
        _synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
        if not bool((tensor == world_size * (world_size + 1) / 2).all()):
            raise RuntimeError(f"an all-reduce of {size} bytes gave a wrong sum on rank {rank}")
    return 2 * (world_size - 1) / world_size * size / min(seconds[1:])


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _disks(folders: Sequence[str]) -> list[dict[str, Any]]:
    by_device: dict[int, dict[str, Any]] = {}
    for folder in folders:
        path = _nearest_existing(Path(folder))
        by_device.setdefault(path.stat().st_dev, {"path": str(path), **_space(path)})
    return list(by_device.values())


def _nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _space(path: str | Path) -> dict[str, int]:
    usage = shutil.disk_usage(path)  # free: for users other than root
    return {"total": usage.total, "free": usage.free}
