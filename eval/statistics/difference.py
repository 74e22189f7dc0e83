"""Whether two sets of trials of one task differ, or only seem to.

A score has two sources of chance. The test set is a sample of examples: the paired bootstrap (Berg-Kirkpatrick et al.
2012, section 2.2) resamples them, the same ones for both sides, since examples that are hard for both say nothing of
the difference. Seeds are the other level, and there are 3 of them rather than 3,000: drawn with replacement they make
only 10 different sets, and their spread is too small by a factor of 2/3, so that an interval of such draws excludes
the truth far more often than it claims. Their level is therefore computed instead of drawn: the variance of a mean of
seeds by the unbiased formula, and the interval with Student's t with the degrees of freedom of Welch 1947 and
Satterthwaite 1946, where the examples' part counts as known. What seeds disagree on in single examples is in both
parts, which makes the interval slightly too wide and never too narrow.

Both sides stand on one pretrained model each: what another seed of the pretraining would give is not covered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.keyed import key_of
from eval.metrics import from_sums

Float = NDArray[np.float64]

SIGNIFICANT = 0.05
RESAMPLES = 10_000
_CELLS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Difference:
    """A second set of trials less a first one, in units of the metric."""

    estimate: float
    """Mean over the second's seeds less mean over the first's."""
    low: float
    high: float
    """The 95 % interval."""
    p: float
    """Two-sided, of no difference."""
    examples: int | None
    """How many were resampled; None: the interval is of the seeds alone, on these test examples."""
    seeds: tuple[int, int]
    """Of the first and of the second; where one is 1, the interval is of the examples alone."""


def difference_of_seeds(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """By the scores alone (Welch 1947); None where a side has fewer than two seeds."""
    if min(len(first), len(second)) < 2:
        return None
    one, other = np.array(first, np.float64), np.array(second, np.float64)
    return _judged(one, other, 0.0, None)


def difference_of_examples(metric: str, first: Float, second: Float, key: str) -> Difference:
    """By resampling the examples of both sides together, and by the spread over the seeds.

    Args:
        metric: of `eval.metrics`.
        first, second: float64 (seeds, N, k), `eval.metrics.statistics` of the same N examples.
        key: names the draws: equal keys draw equally.
    """
    stacked = np.concatenate([first, second])
    trials, examples, k = stacked.shape
    # Examples with equal statistics are drawn as one: the same distribution, and with accuracies 100 times faster.
    kinds, counts = np.unique(stacked.transpose(1, 0, 2).reshape(examples, -1), axis=0, return_counts=True)
    random = np.random.default_rng(key_of("paired bootstrap", key))
    differences = []
    chunk = max(1, _CELLS_AT_ONCE // len(kinds))
    for start in range(0, RESAMPLES, chunk):
        drawn = random.multinomial(examples, counts / examples, min(chunk, RESAMPLES - start))
        values = from_sums(metric, (drawn @ kinds).reshape(-1, trials, k))
        differences.append(values[:, len(first) :].mean(-1) - values[:, : len(first)].mean(-1))
    one, other = (from_sums(metric, side.sum(1)) for side in (first, second))
    return _judged(one, other, float(np.concatenate(differences).var(ddof=1)), examples)


def _judged(first: Float, second: Float, of_examples: float, examples: int | None) -> Difference:
    """Args: of_examples: the variance of the difference of the means that the choice of the examples makes."""
    from scipy.stats import t

    of_seeds = [side.var(ddof=1) / len(side) if len(side) > 1 else 0.0 for side in (first, second)]
    variance = of_examples + sum(of_seeds)
    spread = sum(part**2 / (len(side) - 1) for part, side in zip(of_seeds, (first, second), strict=True) if part)
    freedom = variance**2 / spread if spread else math.inf
    estimate, error = float(second.mean() - first.mean()), math.sqrt(variance)
    margin = error * float(t.ppf(1 - SIGNIFICANT / 2, freedom))
    p = 2 * float(t.sf(abs(estimate) / error, freedom)) if error else float(estimate == 0)
    return Difference(estimate, estimate - margin, estimate + margin, p, examples, (len(first), len(second)))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted so that any wrong rejection has the chance that one has (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, most = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        most = max(most, min(1.0, p_values[i] * (len(p_values) - place)))
        adjusted[i] = most
    return adjusted
