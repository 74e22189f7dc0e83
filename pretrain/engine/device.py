"""Settings and measurements of a rank's device: deterministic kernels, and the rate of matrix products."""

import os
import time

import torch
from torch import Tensor

_MIN_TIMED_S, _MAX_SIZE, _MEASURED_S = 0.02, 8192, 0.5


def use_deterministic_kernels() -> None:
    """Make this process compute the same bits again, on a GPU too; operations without deterministic kernels raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling new memory with NaN shows what reads it before writing, for twice the kernels of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large square matrix product on this device: the best in half a second.

    The size is doubled until a product takes long enough to be timed, or is as large as any layer's. Other processes
    slow single products down: the best of four products was once a third of the rate.
    """
    size, seconds = 512, 0.0
    while seconds < _MIN_TIMED_S and size < _MAX_SIZE:
        size *= 2
        one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = min(_seconds(one, other, device) for _ in range(2))
    until = time.perf_counter() + _MEASURED_S
    while time.perf_counter() < until:
        seconds = min(seconds, _seconds(one, other, device))
    return 2 * size**3 / seconds


def _seconds(one: Tensor, other: Tensor, device: torch.device) -> float:
    _wait_for(device)
    before = time.perf_counter()
    torch.mm(one, other)
    _wait_for(device)
    return time.perf_counter() - before


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
