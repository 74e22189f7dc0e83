"""The baselines of a held-out loss: two models that use no context."""

import math

import numpy as np
from numpy.typing import NDArray


def unigram_log_probabilities(token_counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 (V,): the log of each token's frequency in the training text.

    Args:
        token_counts: int64 (V,); one is added to each (Laplace), so that no token has probability 0.
    """
    smoothed = token_counts + 1.0
    return np.log(smoothed / smoothed.sum())


def unigram_loss(token_counts: NDArray[np.int64], targets: NDArray[np.int64]) -> float:
    """Mean cross-entropy in nats of predicting each target by its frequency in the training text.

    Args:
        token_counts: int64 (V,), of the training text.
        targets: int64 (N,), the tokens that the held-out loss is computed on.
    """
    return float(-unigram_log_probabilities(token_counts)[targets].mean())


def uniform_loss(vocab_size: int) -> float:
    """Cross-entropy in nats of the uniform distribution over the vocabulary."""
    return math.log(vocab_size)
