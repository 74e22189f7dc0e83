"""Deterministic kernels: the same ranks compute the same bits again, on a GPU too."""

import os

import torch


def use_deterministic_kernels() -> None:
    """Of this process, from now on; operations that have none raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It would fill all new memory with NaN, to show what reads it before writing: twice the kernels of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
