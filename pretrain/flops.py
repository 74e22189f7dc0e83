"""Floating-point operations counted from shapes, and how many a second the device does of them at best."""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.objectives.batch import Batch
from pretrain.presets import OBJECTIVES

_LONG_ENOUGH_S, _LARGEST, _TRIES_S = 0.02, 8192, 0.5
_DATASHEET = {  # dense bf16 matrix products with fp32 accumulation, per second; NVIDIA's datasheets
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


def step_flops(model: ModelConfig, vocab_size: int, batch: Batch) -> float:
    """Operations of a forward and backward pass over a batch; a borrowed batch (all counts 0) has none.

    A multiplication and an addition are two. What is computed again in the backward pass is not counted, nor is what
    is not a matrix product (Narayanan et al. 2021, section 5.1; Chowdhery et al. 2022, appendix B).
    """
    if not any(batch.counts.values()):
        return 0.0
    lengths = np.diff(batch.inputs["bounds"])
    return model_flops(model, vocab_size, lengths, batch.counts["token"])


def model_flops(model: ModelConfig, vocab_size: int, lengths: NDArray[np.int64], predicted: int) -> float:
    """Operations of a forward and backward pass.

    Args:
        lengths: int64 (S,), pieces of each sequence.
        predicted: at how many pieces the vocabulary is projected to.
    """
    hidden, causal = model.hidden, OBJECTIVES[model.family] == "clm"
    tokens, pairs = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum())
    projections = tokens * (4 * hidden**2 + 2 * hidden * model.intermediate)
    # Under a causal mask a piece sees half of the others.
    attention = 2 * pairs * hidden * (0.5 if causal else 1.0)
    head = predicted * model.embedding * (vocab_size + (0 if causal else hidden))
    widen = tokens * model.embedding * hidden if model.family == "albert" else 0.0
    return 3 * 2 * (model.layers * (projections + attention) + head + widen)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large square matrix product on this device, measured now: the best of half a second.

    The size is doubled until a product takes long enough to be timed, or is as large as a layer's ever is. What else
    starts on the machine at the same time slows single products: the best of four was seen to be a third of the rate.
    """
    size, seconds = 512, 0.0
    while seconds < _LONG_ENOUGH_S and size < _LARGEST:
        size *= 2
        one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = min(_seconds(one, other, device) for _ in range(2))
    until = time.perf_counter() + _TRIES_S
    while time.perf_counter() < until:
        seconds = min(seconds, _seconds(one, other, device))
    return 2 * size**3 / seconds


def _seconds(one: Tensor, other: Tensor, device: torch.device) -> float:
    _wait_for(device)
    before = time.perf_counter()
    torch.mm(one, other)
    _wait_for(device)
    return time.perf_counter() - before


def datasheet_rate(device_name: str) -> float | None:
    """What the maker says of bf16 products on a GPU of this name; None where it is not known here."""
    return next((rate for name, rate in _DATASHEET.items() if all(word in device_name for word in name.split())), None)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
