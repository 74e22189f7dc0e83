"""How often differences are found where there are none, and where there are some: for few seeds and several tasks.

The tables of docs/evaluation.md are what the long test prints.
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
"""Scores (2 sides, seeds, examples): args: seeds, and the second side's advantage, 0 for none."""

TASKS = (1, 3, 5, 9)
SEEDS = (2, 3, 4, 5)


def means(shared: float, single: float, quiet: float, examples: int = 60) -> Draw:
    """A score that is a mean over examples, all normal. The variances are those of the difference of the sides' means,
    in units of what the seeds make of it.

    Args:
        shared: by examples that all seeds of a side find hard alike.
        single: by what single seeds make of single examples.
        quiet: the second side's variance over the seeds, of the first's.
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
    """Right or wrong answers: of examples of all difficulties, by models that share some of what they find hard."""

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
"""Of the second side, where differences are to be found."""


def p_value(scores: Float, key: str) -> float:
    tables = np.stack([scores, np.ones_like(scores)], -1)
    return difference_of_examples("SQuAD F1", *tables, key=key).p


def former(scores: Float) -> float:
    """By Satterthwaite 1946 of the estimated variances, the method before."""
    values = scores.mean(-1)
    of_seeds = values.var(-1, ddof=1) / scores.shape[1]
    of_examples = float(np.diff(scores.mean(1), axis=0).var() / scores.shape[-1])
    variance = of_examples + of_seeds.sum()
    freedom = variance**2 / (of_seeds**2 / (scores.shape[1] - 1)).sum() if of_seeds.any() else math.inf
    return 2 * float(t.sf(abs(values[1].mean() - values[0].mean()) / math.sqrt(variance), freedom))


def found_of(p_values: Float, tasks: int) -> Float:
    """Which differences are found (groups, tasks), where so many tasks are judged together."""
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
    """The p-values of the former method and of the present one, of the same draws."""
    monkeypatch.setattr(difference, "RESAMPLES", 400)
    rng = np.random.default_rng(seeds)
    drawn = [SCENES[name](rng, seeds, advantage) for _ in range(tries)]
    now = [p_value(scores, str(number)) for number, scores in enumerate(drawn)]
    return np.array([former(scores) for scores in drawn]), np.array(now)


def _row(name: str, seeds: int, shares: list[list[float]]) -> str:
    cells = " | ".join(f"{100 * before:.1f} -> {100 * now:.1f}" for before, now in shares)
    return f"| {name} | {seeds} | {cells} |"
