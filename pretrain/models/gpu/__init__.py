"""Triton kernels. torch's CUDA wheels for Linux bring Triton along and its CPU wheels do not, so that these modules are
imported only where `can_run` says so."""

from importlib.util import find_spec

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = find_spec("triton") is not None


def can_run(x: Tensor) -> bool:
    """Whether the kernels take x: on a GPU, in fp32, bf16 or fp16, where Triton is installed."""
    return _HAS_TRITON and x.device.type == "cuda" and x.dtype in _DTYPES
