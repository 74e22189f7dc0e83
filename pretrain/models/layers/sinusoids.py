"""Sinusoidal position embeddings (Vaswani et al. 2017, section 3.5)."""

import torch
from torch import Tensor

from multihop.pretrain.models.layers.cached_tables import cached_table


@cached_table
def sinusoids(positions: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(positions, width): sin(position / 10000^(2i / width)) in the first half of the columns, cos in the second.

    The paper interleaves them, which only differs in the order of the columns; tensor2tensor and Marian have halves.
    """
    position = torch.arange(positions, dtype=torch.float64)[:, None]
    sines = (width + 1) // 2
    angles = position / 10000 ** (2 * torch.arange(sines, dtype=torch.float64) / width)
    return torch.cat([angles.sin(), angles[:, : width - sines].cos()], 1).to(device, dtype)
