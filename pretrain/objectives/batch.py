"""What an objective gives to a model: packed sequences of any lengths, without padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Inputs = dict[str, NDArray[np.int64] | int]


@dataclass(frozen=True)
class Batch:
    """Some samples as arrays."""

    inputs: Mapping[str, NDArray[np.int64] | int | float]
    """The keyword arguments of the model's forward: those of `layout`, input_ids (N,), and the objective's own."""
    targets: NDArray[np.int64]
    """int64, flat: the tokens to predict."""
    counts: dict[str, int]
    """The divisor that makes a mean of each sum that the model returns, once added up over all ranks."""
    tokens: int
    """Number of input tokens."""


def layout(lengths: Sequence[int] | NDArray[np.int64]) -> Inputs:
    """Packed sequences of these lengths, N tokens in all.

    Returns:
        cu_seqlens: int64 (S + 1,), cumulative sequence lengths, from 0 to N. Attention stays within a sequence.
        positions: int64 (N,), each token's position in its sequence, from 0.
        max_seqlen: the length of the longest sequence.
    """
    each = np.asarray(lengths, np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(each)]).astype(np.int64)
    positions = np.arange(cu_seqlens[-1], dtype=np.int64) - np.repeat(cu_seqlens[:-1], each)
    return {"cu_seqlens": cu_seqlens, "positions": positions, "max_seqlen": int(each.max())}
