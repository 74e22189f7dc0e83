"""What every zero-shot evaluation returns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ZeroShotResult:
    """A value, and the numbers per example that it is computed from."""

    value: float
    other_metrics: dict[str, float]
    statistics: NDArray[np.float64]
    """(examples, 2). Accuracy: [1 if correct else 0, 1]. Perplexity: [negative log-likelihood in nats, count]. The
    column sums determine `value`, so that examples can be resampled."""


def accuracy_result(correct: NDArray[np.bool_], other_metrics: dict[str, float]) -> ZeroShotResult:
    """The fraction of examples that are correct.

    Args:
        correct: bool (examples,), at least one.
    """
    statistics = np.stack([correct, np.ones_like(correct)], axis=1).astype(np.float64)
    return ZeroShotResult(float(correct.mean()), other_metrics, statistics)
