"""What a held-out loss has to beat: two models that look at no context."""

import math

import numpy as np
from numpy.typing import NDArray


def unigram_loss(token_counts: NDArray[np.int64], targets: NDArray[np.int64]) -> float:
    """Mean cross-entropy in nats of guessing each target by its frequency in the training text.

    Args:
        token_counts: int64 (vocabulary,), from the training text; one is added to each (Laplace), so that nothing
            has probability 0.
        targets: int64 (N,), the pieces that the held-out loss is computed on.
    """
    smoothed = token_counts + 1.0
    return float(-np.log(smoothed / smoothed.sum())[targets].mean())


def uniform_loss(vocab_size: int) -> float:
    """Cross-entropy in nats of guessing every piece with the same probability."""
    return math.log(vocab_size)
