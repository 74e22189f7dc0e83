"""Numbers and differences as text."""

import math

from multihop.eval.statistics.difference import SIGNIFICANT, Difference

_AS_THEY_ARE = ("perplexity", "BLEU")
"""Metrics that are printed as they are: not from 0 to 1, so that points (hundredths) make no sense."""


def show(value: float | None) -> str:
    """Format a metric or a loss for tables; None becomes `none`."""
    if value is None:
        return "none"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def spread(values: list[float]) -> str:
    """Format the median with the minimum and the maximum; no values become `none`."""
    if not values:
        return "none"
    ordered = sorted(values)
    half = len(ordered) // 2
    middle = show((ordered[half] + ordered[-half - 1]) / 2)
    return middle if len(values) == 1 else f"{middle} [{show(ordered[0])} to {show(ordered[-1])}]"


def amount(difference: Difference, metric: str, sign: int = 1) -> str:
    """Format a difference with its interval, `1.8 points [0.9 to 2.7]`: a point is a hundredth of a metric from 0 to 1.

    An infinite interval is omitted.

    Args:
        sign: 1: the second less the first; -1: the first less the second.
    """
    low, high = sorted((sign * difference.low, sign * difference.high))
    values = [sign * difference.estimate, low, high]
    if metric in _AS_THEY_ARE:
        texts, unit = [show(value) for value in values], ""
    else:
        texts, unit = [f"{100 * value:.1f}".replace("-0.0", "0.0") for value in values], " points"
    return f"{texts[0]}{unit}" + (f" [{texts[1]} to {texts[2]}]" if math.isfinite(high) else "")


def sentence(
    names: tuple[str, str], task: str, metric: str, higher_is_better: bool, difference: Difference, p: float
) -> str:
    """Say in a sentence which of two sets of trials is better on a task, if the difference is significant.

    Args:
        names: names of the first and of the second set.
        difference: the second set less the first.
        p: p-value of the difference, corrected for the number of tasks.
    """
    if p > SIGNIFICANT:
        return f"no significant difference on {task} ({amount(difference, metric)})"
    sign = 1 if difference.estimate > 0 else -1
    winner = names[1] if (sign > 0) == higher_is_better else names[0]
    return f"{winner} is better on {task} by {amount(difference, metric, sign)}"


def basis(difference: Difference) -> str:
    """Describe what a difference was computed from: the number of test examples, and of seeds."""
    if difference.examples is None:
        return "based on the seeds alone, without files of predictions: the choice of test examples is not covered"
    if min(difference.seeds) < 2:
        return f"based on {difference.examples:,} test examples alone: one seed does not show the spread over seeds"
    return f"based on {difference.examples:,} test examples and {difference.seeds[0]} + {difference.seeds[1]} seeds"
