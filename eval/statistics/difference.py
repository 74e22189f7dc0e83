"""Tests whether the mean scores of two sets of trials of one task differ significantly.

A score has two sources of variance, which are judged together:

- The test set is a sample of examples. The paired bootstrap (Berg-Kirkpatrick et al. 2012, section 2.2) resamples them,
  the same ones for all trials of both sides, since the difficulty of an example cancels out of the difference. The
  examples' part is the covariance between the scores of different seeds: the interaction of seed and example is
  independent between seeds and is already part of the spread over the seeds (as in Owen 2007, section 3).
- Seeds are few. A bootstrap of three seeds has only ten different samples, and its variance is too small by a factor of
  2/3. So the seeds' part is the unbiased variance of a mean, with the degrees of freedom of Welch 1947.

The sum of the two parts has no exact test. Satterthwaite's approximation takes the estimated variances for the true
ones, and is far too confident if two seeds happen to agree. The Behrens-Fisher solution, which is conservative
(Robinson 1976), keeps the uncertainty of the estimates: the difference is compared with the sum of two independent
Student's t variables, each scaled by the standard error of its part. The p-value is never smaller than that of the
examples alone, which matters where all seeds happen to have the same score.

Where each side is one pretrained model, seeds are those of fine-tuning, and the variance over pretraining seeds is not
covered. Where a recipe was pretrained with several seeds, these are the seeds, and the score of each is the mean over
its fine-tuning seeds: pretraining seeds and examples are what the multi-bootstrap resamples, too (Sellam et al. 2022).
Measured levels and powers are in docs/evaluation.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of
from multihop.eval.metrics.score import from_sums

Float = NDArray[np.float64]

SIGNIFICANT = 0.05
FEWEST_EXAMPLES = 10
"""Fewest test examples for a verdict: the variance over fewer is too uncertain."""
RESAMPLES = 10_000
_CELLS_AT_ONCE = 2**22
_POINTS = 1001
_DOUBLINGS = 40
"""The most doublings of the largest score in the search for the interval's ends."""
_LARGEST = np.finfo(np.float64).max
_ROUNDING = 1e-12
"""Relative differences between scores that are rounding errors."""


@dataclass(frozen=True)
class Difference:
    """A second set of trials less a first one, in units of the metric."""

    estimate: float
    """Mean over the second's seeds less mean over the first's."""
    low: float
    high: float
    """The 95 % interval; infinite if no difference would be significant."""
    p: float
    """Two-sided p-value of the hypothesis that there is no difference."""
    examples: int | None
    """Number of examples that were resampled; None: the interval is of the seeds alone, on these test examples."""
    seeds: tuple[int, int]
    """Numbers of seeds of the first and the second set; if one is 1, the interval is of the examples alone."""


def difference_of_seeds(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Compute the difference from the scores alone (Welch 1947); None if a side has fewer than two seeds."""
    if min(len(first), len(second)) < 2:
        return None
    scale, sides = _scaled(np.array(first, np.float64), np.array(second, np.float64))
    seeds, freedom = _of_seeds(sides)
    # Without any spread the p-value is that of the exact permutation test: one of all assignments of seeds to sides.
    least = 2 / math.comb(len(first) + len(second), len(first)) if not seeds else 0.0
    tail = _tail(seeds, freedom)
    return _judged(sides, scale, lambda size: max(least, tail(size)), None)


def difference_of_examples(
    metric: str, first: Float, second: Float, key: str, seeds: tuple[Sequence[int], Sequence[int]] | None = None
) -> Difference:
    """Compute the difference by resampling the examples of both sides together, and from the spread over the seeds.

    Args:
        metric: a metric of `multihop.eval.metrics.score`.
        first, second: float64 (trials, N, k), `multihop.eval.metrics.score.statistics` of the same N examples.
        key: seeds the draws: equal keys give equal draws.
        seeds: for each side the seed of each trial, counted from 0; a seed's score is the mean over its trials.
            By default each trial is a seed.
    """
    means = [mean_by_seed(of_side) for of_side in seeds or (range(len(first)), range(len(second)))]
    stacked = np.concatenate([first, second])
    trials, examples, k = stacked.shape
    # Examples with equal statistics are drawn as one: the same distribution, and with accuracies 100 times faster.
    kinds, counts = np.unique(stacked.transpose(1, 0, 2).reshape(examples, -1), axis=0, return_counts=True)
    random = np.random.default_rng(key_of("paired bootstrap", key))
    drawn_values = []
    chunk = max(1, _CELLS_AT_ONCE // len(kinds))
    for start in range(0, RESAMPLES, chunk):
        drawn = random.multinomial(examples, counts / examples, min(chunk, RESAMPLES - start))
        scores = np.minimum(from_sums(metric, (drawn @ kinds).reshape(-1, trials, k)), _LARGEST)
        drawn_values.append(np.hstack([scores[:, : len(first)] @ means[0], scores[:, len(first) :] @ means[1]]))
    totals = (np.minimum(from_sums(metric, side.sum(1)), _LARGEST) for side in (first, second))
    scale, sides = _scaled(*(scores @ mean for scores, mean in zip(totals, means, strict=True)))
    if examples < 2:
        return _judged(sides, scale, lambda size: 1.0, examples)
    resampled = np.concatenate(drawn_values) / scale
    # The variance of a resampled mean is too small by (N - 1) / N.
    covariance = np.cov(resampled, rowvar=False) * examples / (examples - 1)
    alone, shared = _of_examples(covariance, len(sides[0]))
    least = 2.0 ** (1 - examples)  # the exact permutation test, which exchanges the two sides' answers per example
    by_examples = _tail(alone, examples - 1)
    by_both = _tail_of_sum((shared, examples - 1), _of_seeds(sides))
    return _judged(sides, scale, lambda size: max(least, by_examples(size), by_both(size)), examples)


def mean_by_seed(seeds: Sequence[int]) -> Float:
    """Return the matrix (trials, seeds) by which scores of trials are multiplied to get the mean of each seed."""
    belongs = np.eye(max(seeds) + 1)[list(seeds)]
    return belongs / belongs.sum(0)


def _scaled(first: Float, second: Float) -> tuple[float, tuple[Float, Float]]:
    """Return the largest of all scores, and the scores in units of it: squares of a diverged model's perplexities would
    be beyond the largest number."""
    scale = float(max(np.abs(first).max(), np.abs(second).max())) or 1.0
    return scale, (first / scale, second / scale)


def _of_examples(covariance: Float, firsts: int) -> tuple[float, float]:
    """Return the standard errors of the difference due to the choice of the examples.

    Args:
        covariance: (seeds, seeds), covariance of the scores, the first side's before the second's.
        firsts: number of seeds of the first side.

    Returns:
        The standard error given these seeds, and the part of it that is shared by all seeds.
    """
    blocks = covariance[:firsts, :firsts], covariance[firsts:, firsts:]
    between = 2 * float(covariance[:firsts, firsts:].mean())
    alone = sum(float(block.mean()) for block in blocks) - between
    shared = sum(_off_diagonal_mean(block) for block in blocks) - between
    return math.sqrt(max(0.0, alone)), math.sqrt(max(0.0, shared))


def _off_diagonal_mean(block: Float) -> float:
    """Return the mean covariance of two different seeds; of a single seed, its variance."""
    n = len(block)
    return float((block.sum() - np.trace(block)) / (n * (n - 1))) if n > 1 else float(block[0, 0])


def _of_seeds(sides: tuple[Float, Float]) -> tuple[float, float]:
    """Return the standard error of the difference due to the seeds, and its degrees of freedom (Welch 1947)."""
    parts = [(_variance(side) / len(side), len(side) - 1) for side in sides if len(side) > 1]
    variance, spread = sum(part for part, _ in parts), sum(part**2 / freedom for part, freedom in parts)
    return math.sqrt(variance), variance**2 / spread if spread else math.inf


def _variance(scores: Float) -> float:
    return 0.0 if np.ptp(scores) <= _ROUNDING * np.abs(scores).max() else float(scores.var(ddof=1))


def _tail(error: float, freedom: float) -> Callable[[float], float]:
    """Return a function from the size of a difference to its two-sided p-value: Student's t, scaled by a standard
    error."""
    from scipy.special import stdtr

    return lambda size: 2 * float(stdtr(freedom, -size / error)) if error else float(not size)


def _tail_of_sum(one: tuple[float, float], other: tuple[float, float]) -> Callable[[float], float]:
    """Return a function as `_tail`, for the sum of two independent variables (standard error, degrees of freedom)."""
    from scipy.special import expit, stdtr, stdtrit

    if not one[0] or not other[0]:
        return _tail(*(one if one[0] else other))
    # Integrate over the quantiles of `other`, evenly spaced in log odds, so that heavy tails get enough points.
    odds = np.linspace(-30, 30, _POINTS)
    weights = 2 * expit(odds) * expit(-odds) * (odds[1] - odds[0])
    quantiles = np.sign(odds) * stdtrit(other[1], expit(-abs(odds)))
    return lambda size: float(weights @ stdtr(one[1], (other[0] * quantiles - size) / one[0]))


def _judged(
    sides: tuple[Float, Float], scale: float, p_value: Callable[[float], float], examples: int | None
) -> Difference:
    """Invert the test into an interval.

    Args:
        sides: the scores in units of `scale`.
        p_value: maps the size of a difference in these units to its p-value; decreasing.
    """
    from scipy.optimize import brentq

    first, second = sides
    estimate = float(second.mean() - first.mean())
    # The interval holds every true difference that the observed one does not contradict significantly.
    margin, within, beyond = math.inf, 0.0, 1.0
    for _ in range(_DOUBLINGS):
        if p_value(beyond) <= SIGNIFICANT:
            margin = float(brentq(lambda size: p_value(size) - SIGNIFICANT, within, beyond, xtol=1e-9 * beyond))
            break
        within, beyond = beyond, 2 * beyond
    low, high = scale * (estimate - margin), scale * (estimate + margin)
    return Difference(scale * estimate, low, high, p_value(abs(estimate)), examples, (len(first), len(second)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests, so that the probability of any wrong rejection is that of one (Holm
    1979)."""
    by_p = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, most = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(by_p):
        most = max(most, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = most
    return adjusted
