"""Numbers and differences as text."""

import math

from multihop.eval.statistics.difference import SIGNIFICANT, Difference

_AS_THEY_ARE = ("perplexity", "BLEU")
"""Metrics that are not from 0 to 1, of which a point would be a hundredth."""


def show(value: float | None) -> str:
    """A metric or a loss as text for tables; `none` for None."""
    if value is None:
        return "none"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def spread(values: list[float]) -> str:
    """The median with the minimum and the maximum; `none` for no values."""
    if not values:
        return "none"
    ordered = sorted(values)
    half = len(ordered) // 2
    middle = show((ordered[half] + ordered[-half - 1]) / 2)
    return middle if len(values) == 1 else f"{middle} [{show(ordered[0])} to {show(ordered[-1])}]"


def amount(difference: Difference, metric: str, sign: int = 1) -> str:
    """A difference with its interval: `1.8 points [0.9 to 2.7]`, where a point is a hundredth of a metric from 0 to 1.
    An infinite interval is omitted.

    Args:
        sign: -1 for the first less the second.
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
    """A sentence on which of two sets of trials is better on a task, if either is.

    Args:
        names: of the first and of the second, of which `difference` is the second less the first.
        p: of `difference`, corrected for the number of tasks.
    """
    if p > SIGNIFICANT:
        return f"no significant difference on {task} ({amount(difference, metric)})"
    sign = 1 if difference.estimate > 0 else -1
    winner = names[1] if (sign > 0) == higher_is_better else names[0]
    return f"{winner} is better on {task} by {amount(difference, metric, sign)}"


def basis(difference: Difference) -> str:
    """What a difference was judged by, in words."""
    if difference.examples is None:
        return "judged by the seeds alone, without files of predictions: how the test examples fell is not in it"
    if min(difference.seeds) < 2:
        return (
            f"judged by {difference.examples:,} test examples alone: with one seed, the spread over seeds is not in it"
        )
    return f"judged by {difference.examples:,} test examples and {difference.seeds[0]} + {difference.seeds[1]} seeds"
