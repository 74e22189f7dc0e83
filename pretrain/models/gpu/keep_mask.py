"""The masks of dropout within kernels, which draw them again in the backward pass instead of storing them."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def draw_seed(rate: float, device: torch.device) -> Tensor:
    """int64 (1,): a seed from torch's generator of the device; 0, and nothing is drawn, without dropout."""
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    return seed.random_() if rate > 0 else seed


def dropout_arguments(rate: float) -> tuple[int, float]:
    """The threshold of `is_kept` and the scale of what is kept."""
    threshold = min(round(rate * 2**32), 2**32 - 1)
    return threshold, 1 / (1 - rate) if rate < 1 else 0.0


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # no types: Triton would compile them
def is_kept(seed, threshold, rows, columns):  # type: ignore[no-untyped-def]
    """Whether each element of a row is kept, for int32 `rows` and `columns` of shapes that broadcast.

    A row starts at a number from Philox, keyed by `seed`, and its elements are those of SplitMix from there: a Weyl
    sequence through MurmurHash3's finalizer. Philox for each element would take longer than all else in a kernel.
    """
    x = tl.randint(tl.load(seed), rows).to(tl.uint32, bitcast=True) + columns.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)) >= threshold.to(tl.uint32)
