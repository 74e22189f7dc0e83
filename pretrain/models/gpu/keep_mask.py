"""The masks of dropout within kernels, which draw them again in the backward pass instead of storing them."""

import torch
from torch import Tensor

from multihop.pretrain.models.gpu.kernel import tl, triton


def draw_seed(rate: float, device: torch.device) -> Tensor:
    """int64 (1,): a seed from torch's generator of the device; without dropout no seed is drawn, nor is it read."""
    if rate == 0:
        return torch.empty(1, dtype=torch.int64, device=device)
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def dropout_arguments(rate: float) -> tuple[int, float]:
    """The threshold of `is_kept` and the scale of what is kept."""
    threshold = min(round(rate * 2**32), 2**32 - 1)
    return threshold, 1 / (1 - rate) if rate < 1 else 0.0


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # no types: Triton would compile them
def is_kept(seed, threshold, rows, columns):  # type: ignore[no-untyped-def]
    """Whether each element of a row is kept, for int32 `rows` and `columns` of shapes that broadcast.

    A row starts at a number from Philox, keyed by `seed`, and goes on as in SplitMix (Steele et al. 2014), in 32 bits:
    a Weyl sequence through MurmurHash3's finalizer. Philox for each element would take longer than all else in a
    kernel. Two rows of 1,024 columns overlap, one's mask being the other's shifted, with a probability of 5e-7.
    """
    x = tl.randint(tl.load(seed), rows).to(tl.uint32, bitcast=True) + columns.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)) >= threshold.to(tl.uint32)
