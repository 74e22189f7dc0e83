"""How often differences are significant with and without a true difference, for few seeds and several tasks.

The long test prints the tables of docs/evaluation.md.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import t
from tables_of_tests import Table

from multihop.eval.statistics import difference
from multihop.eval.statistics.difference import SIGNIFICANT, difference_of_examples, holm

Float = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, float], Float]
"""Draws scores (2 sides, seeds, examples) from a generator, the number of seeds and the second side's advantage."""

TASKS = (1, 3, 5, 9)
SEEDS = (2, 3, 4, 5)


def means(shared: float, single: float, quiet: float, examples: int = 60) -> Draw:
    """Return a function that draws normal scores whose mean over the examples is the result.

    Variances are those of the difference of the sides' means, in units of the variance that comes from the seeds.

    Args:
        shared: variance from examples that are equally hard for all seeds of a side.
        single: variance from interactions of single seeds with single examples.
        quiet: the second side's variance over the seeds, relative to the first's.
    """

    def draw(rng: np.random.Generator, seeds: int, advantage: float) -> Float:
        side = rng.normal(size=(2, 1, examples)) * math.sqrt(shared * examples / 2)
        own = rng.normal(size=(2, seeds, examples)) * math.sqrt(single * examples * seeds / 2)
        spread = np.sqrt(np.array([1.0, quiet]) * seeds / (1 + quiet))[:, None, None]
        scores = side + own + spread * rng.normal(size=(2, seeds, 1))
        scores[1] += advantage
        return scores

    return draw


def accuracies(of_seeds: float, examples: int = 150) -> Draw:
    """Return a function that draws right or wrong answers to examples of all difficulties, some hard for all models."""

    def draw(rng: np.random.Generator, seeds: int, advantage: float) -> Float:
        able = 1 + 1.5 * rng.normal(size=examples) + 0.5 * rng.normal(size=(2, 1, examples))
        able = able + of_seeds * rng.normal(size=(2, seeds, 1)) + 0.5 * rng.logistic(size=(2, seeds, examples))
        able[1] += advantage
        return (able > 0).astype(np.float64)

    return draw


SCENES = {
    "seeds alone, nearly": means(0.1, 0.0, 1.0),
    "seeds more than examples": means(0.3, 0.0, 1.0),
    "seeds as much as examples": means(1.0, 1.0, 1.0),
    "only one side's seeds differ": means(0.3, 0.3, 0.0),
    "accuracies, seeds differ little": accuracies(0.1),
    "accuracies, seeds differ much": accuracies(0.4),
}

ADVANTAGES = {"seeds more than examples": 4.0, "seeds as much as examples": 6.0, "accuracies, seeds differ little": 0.6}
"""Advantages of the second side with which differences should be significant."""


def p_value(scores: Float, key: str) -> float:
    tables = np.stack([scores, np.ones_like(scores)], -1)
    return difference_of_examples("SQuAD F1", *tables, key=key).p


def former(scores: Float) -> float:
    """Return the p-value of the former method, Satterthwaite 1946 with the estimated variances."""
    values = scores.mean(-1)
    of_seeds = values.var(-1, ddof=1) / scores.shape[1]
    of_examples = float(np.diff(scores.mean(1), axis=0).var() / scores.shape[-1])
    variance = of_examples + of_seeds.sum()
    freedom = variance**2 / (of_seeds**2 / (scores.shape[1] - 1)).sum() if of_seeds.any() else math.inf
    return 2 * float(t.sf(abs(values[1].mean() - values[0].mean()) / math.sqrt(variance), freedom))


def found_of(p_values: Float, tasks: int) -> Float:
    """Return which differences are significant (groups, tasks) when so many tasks are judged together."""
    groups = p_values[: len(p_values) // tasks * tasks].reshape(-1, tasks)
    return np.array([[p <= SIGNIFICANT for p in holm(group.tolist())] for group in groups])


@pytest.mark.parametrize("seeds", [2, 3])
def test_with_few_seeds_the_error_rate_keeps_its_level(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "RESAMPLES", 200)
    rng, tries = np.random.default_rng(seeds), 1080
    draw = SCENES["only one side's seeds differ"]
    drawn = [draw(rng, seeds, 0.0) for _ in range(tries)]
    now = np.array([p_value(scores, str(number)) for number, scores in enumerate(drawn)])
    before = np.array([former(scores) for scores in drawn])
    for tasks in (1, 9):
        wrong = found_of(now, tasks).any(1)
        # As many as this have a chance of less than 1 % at the nominal level.
        most = SIGNIFICANT * len(wrong) + 2.4 * math.sqrt(SIGNIFICANT * (1 - SIGNIFICANT) * len(wrong))
        assert wrong.sum() <= most
    assert found_of(before, 9).any(1).mean() > 0.1


def test_with_five_seeds_the_power_is_that_of_the_former_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "RESAMPLES", 200)
    rng = np.random.default_rng(5)
    drawn = [accuracies(0.1, 300)(rng, 5, 0.4) for _ in range(100)]
    now = np.array([p_value(scores, str(number)) for number, scores in enumerate(drawn)])
    before = np.array([former(scores) for scores in drawn])
    for tasks in (1, 9):
        assert found_of(now, tasks).mean() > found_of(before, tasks).mean() - 0.1 > 0.3


@pytest.mark.long
@pytest.mark.parametrize("name", SCENES)
def test_levels(name: str, monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    tries = 4500
    for seeds in SEEDS:
        before, now = _both(name, seeds, 0.0, tries, monkeypatch)
        levels = [[float(found_of(p_values, tasks).any(1).mean()) for p_values in (before, now)] for tasks in TASKS]
        table(_row(name, seeds, levels))
        for tasks, (_, level) in zip(TASKS, levels, strict=True):
            assert level <= SIGNIFICANT + 3 * math.sqrt(SIGNIFICANT * (1 - SIGNIFICANT) / (tries // tasks))


@pytest.mark.long
@pytest.mark.parametrize("name", ADVANTAGES)
def test_powers(name: str, monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    for seeds in SEEDS:
        before, now = _both(name, seeds, ADVANTAGES[name], 900, monkeypatch)
        powers = [[float(found_of(p_values, tasks).mean()) for p_values in (before, now)] for tasks in TASKS]
        table(_row(name, seeds, powers))
        assert seeds < 5 or powers[0][1] > powers[0][0] - 0.05


def _both(name: str, seeds: int, advantage: float, tries: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Float, Float]:
    """Return the p-values of the former method and of the present one, for the same draws."""
    monkeypatch.setattr(difference, "RESAMPLES", 400)
    rng = np.random.default_rng(seeds)
    drawn = [SCENES[name](rng, seeds, advantage) for _ in range(tries)]
    now = [p_value(scores, str(number)) for number, scores in enumerate(drawn)]
    return np.array([former(scores) for scores in drawn]), np.array(now)


def _row(name: str, seeds: int, shares: list[list[float]]) -> str:
    cells = " | ".join(f"{100 * before:.1f} -> {100 * now:.1f}" for before, now in shares)
    return f"| {name} | {seeds} | {cells} |"
