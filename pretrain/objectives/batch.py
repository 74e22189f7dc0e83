"""What an objective hands to a model."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """Some samples as arrays."""

    inputs: dict[str, NDArray[np.int64]]
    """The keyword arguments of the model's forward."""
    targets: NDArray[np.int64]
    """The pieces to predict, flat."""
    counts: dict[str, int]
    """By how many each sum that the model returns has to be divided, over all ranks, to become a mean."""
    tokens: int
    """Real pieces, padding not counted."""
