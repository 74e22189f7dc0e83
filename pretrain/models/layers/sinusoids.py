"""Sinusoidal position embeddings (Vaswani et al. 2017, section 3.5)."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def sinusoids(positions: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(positions, width): sin(position / 10000^(2i / width)) in the first half of the columns, cos in the second.

    The paper interleaves them, which only differs in the order of the columns; tensor2tensor and Marian have halves.
    They are computed instead of stored in a buffer, because a model on the meta device has no values.
    """
    with torch.inference_mode(False):  # the cached result may be used in training
        position = torch.arange(positions, dtype=torch.float64)[:, None]
        sines = (width + 1) // 2
        angles = position / 10000 ** (2 * torch.arange(sines, dtype=torch.float64) / width)
        return torch.cat([angles.sin(), angles[:, : width - sines].cos()], 1).to(device, dtype)
