"""What an objective hands to a model: sequences of any lengths, one behind the other, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Inputs = dict[str, NDArray[np.int64] | int]


@dataclass(frozen=True)
class Batch:
    """Some samples as arrays."""

    inputs: Inputs
    """The keyword arguments of the model's forward: those of `layout`, input_ids (N,), and what the objective adds."""
    targets: NDArray[np.int64]
    """The pieces to predict, flat."""
    counts: dict[str, int]
    """By how many each sum that the model returns has to be divided, over all ranks, to become a mean."""
    tokens: int
    """Pieces that the model reads."""


def layout(lengths: Sequence[int] | NDArray[np.int64]) -> Inputs:
    """Where sequences of these lengths stand that are laid one behind the other, N pieces in all.

    Returns:
        bounds: int64 (sequences + 1,), where each begins, and N. Attention stays within a sequence.
        positions: int64 (N,), each piece's place in its sequence.
        longest: the greatest length.
    """
    each = np.asarray(lengths, np.int64)
    bounds = np.concatenate([[0], np.cumsum(each)]).astype(np.int64)
    positions = np.arange(bounds[-1], dtype=np.int64) - np.repeat(bounds[:-1], each)
    return {"bounds": bounds, "positions": positions, "longest": int(each.max())}
