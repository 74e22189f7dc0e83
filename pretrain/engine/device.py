"""Settings and measurements of a rank's device: its memory, deterministic kernels, and the rate of matrix products."""

import os
import time

import torch
from torch import Tensor

_MIN_TIMED_S, _MAX_SIZE, _MEASURED_S = 0.02, 8192, 0.5


def use_deterministic_kernels() -> None:
    """Make this process compute bit-identical results, on a GPU too; operations without deterministic kernels raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling new memory with NaN would detect reads of uninitialized memory, and double the kernels of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_expandable_segments() -> None:
    """Let the memory that torch's allocator has taken from a GPU grow; to be called before the first allocation.

    Nearly every micro-batch of packed sequences has another number of tokens, so that freed blocks seldom fit the next
    one: without this, a sixth to a fifth of the memory was unusable, and micro-batches that should fit did not. Nothing
    is changed if the user has set the variable, which has two names.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large square matrix product on this device: the best in half a second.

    The size is doubled until a product takes long enough to be timed, or is as large as any layer's. It takes the best
    of many products because other processes slow single ones down: the best of four once gave a third of the rate.
    """
    size, seconds = 512, 0.0
    while seconds < _MIN_TIMED_S and size < _MAX_SIZE:
        size *= 2
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = min(_time_matmul(a, b, device) for _ in range(2))
    deadline = time.perf_counter() + _MEASURED_S
    while time.perf_counter() < deadline:
        seconds = min(seconds, _time_matmul(a, b, device))
    return 2 * size**3 / seconds


def _time_matmul(a: Tensor, b: Tensor, device: torch.device) -> float:
    _synchronize(device)
    before = time.perf_counter()
    torch.mm(a, b)
    _synchronize(device)
    return time.perf_counter() - before


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
