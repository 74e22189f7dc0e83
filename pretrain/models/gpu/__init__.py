"""Kernels for a GPU, in Triton, which torch's CUDA wheels for Linux bring along. These modules are imported only where
`can_run` says so.

A tensor on the meta device stands for one on a GPU that has Triton: a model computes it as there, without data.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from multihop.pretrain.device_type import device_type

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = find_spec("triton") is not None


def can_run(x: Tensor) -> bool:
    """Whether the kernels take x: on a GPU, in fp32, bf16 or fp16, where Triton is installed."""
    return device_type(x.device) == "cuda" and (_HAS_TRITON or x.is_meta) and x.dtype in _DTYPES
