"""How fast a node's devices multiply matrices, and whether they do so without errors. Runs on the node."""

import os
from typing import Any

_SIZE, _REPEATS = 1024, 20
_TOLERANCE = 1e-5
"""Largest error of a product in float32, relative to the sum of its terms' sizes; rounding makes about 1e-7 of it."""


def compute(on_gpu: bool) -> dict[str, Any]:
    """Measure each GPU, or the CPU.

    Returns:
        cuda and nccl (versions, or None), and devices: a row for each of {name, flops (per second), wrong (how many of
        20 products were)}.

    Raises:
        RuntimeError: a GPU is asked for, and torch finds none.
    """
    import torch

    from multihop.common.machine import cpu_model

    if on_gpu and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU: compare its CUDA version with the driver's")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    if on_gpu:
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        devices = [_measure(torch.device("cuda", number)) | {"name": name} for number, name in enumerate(names)]
    else:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # Ray sets one thread for a task that reserves no CPU
        devices = [_measure(torch.device("cpu")) | {"name": cpu_model()}]
    return {"cuda": torch.version.cuda, "nccl": nccl, "devices": devices}


def _measure(device: Any) -> dict[str, Any]:
    import torch

    from multihop.pretrain.engine.peak_flops import matmul_rate

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"flops": matmul_rate(device, dtype), "wrong": _wrong_products(device)}


def _wrong_products(device: Any) -> int:
    """How many of equal products of random matrices differ from a reference in float64, computed on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(_SIZE, _SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    one, other = one.float().double(), other.float().double()
    reference, sizes = one @ other, one.abs() @ other.abs()
    near, far = one.float().to(device), other.float().to(device)
    return sum(
        not bool((((near @ far).cpu().double() - reference).abs() <= _TOLERANCE * sizes).all()) for _ in range(_REPEATS)
    )
