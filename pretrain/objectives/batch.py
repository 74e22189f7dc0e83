"""The inputs and targets that an objective makes for a model."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multihop.pretrain.packed_tokens import PackedTokens

ModelInput = PackedTokens[NDArray[np.int64]] | NDArray[np.int64] | NDArray[np.bool_] | float | int


@dataclass(frozen=True)
class Batch:
    """Samples as arrays."""

    inputs: Mapping[str, ModelInput]
    """The keyword arguments of the model's forward: packed tokens, and what the objective predicts."""
    targets: NDArray[np.int64]
    """int64 (M,): the tokens to predict."""
    counts: dict[str, int]
    """The number of terms in each sum that the model returns; the sum over all ranks is the divisor of its mean."""
    tokens: int
    """Number of input tokens, without those of memories."""
