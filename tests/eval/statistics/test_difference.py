"""Differences are significant where there are some, and not where there are none."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from multihop.eval.statistics import difference
from multihop.eval.statistics.difference import difference_of_examples, difference_of_seeds, holm
from multihop.eval.statistics.formatting import amount, basis, sentence

Float = NDArray[np.float64]


def trials(rng: np.random.Generator, skill: float, hardness: Float, seeds: int = 3, of_seeds: float = 0.1) -> Float:
    """Return accuracy statistics (seeds, N, 2) of trials of one model with several seeds, on examples of `hardness`."""
    model = rng.normal(size=hardness.shape) * 0.5
    abilities = skill + of_seeds * rng.normal(size=(seeds, 1)) + 0.5 * rng.normal(size=(seeds, len(hardness)))
    right = (abilities + model > hardness).astype(np.float64)
    return np.stack([right, np.ones_like(right)], -1)


@pytest.mark.parametrize("of_seeds", [0.0, 0.1, 0.5])
def test_trials_of_one_distribution_are_rarely_called_different(
    of_seeds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difference, "RESAMPLES", 300)
    rng, tries = np.random.default_rng(1), 200
    called = 0
    for number in range(tries):
        hardness = rng.normal(size=150)
        first, second = (trials(rng, 0.8, hardness, of_seeds=of_seeds) for _ in range(2))
        result = difference_of_examples("accuracy", first, second, str(number))
        assert (result.p <= 0.05) == (not result.low <= 0 <= result.high)
        called += result.p <= 0.05
    # 5 % of 200 is 10; 18 and more have a chance of 1 %.
    assert called < 18


def test_seeds_alone_of_one_distribution_are_rarely_called_different() -> None:
    rng, tries = np.random.default_rng(2), 1000
    result = [difference_of_seeds(*rng.normal(size=(2, 3))) for _ in range(tries)]
    assert sum(one is not None and one.p <= 0.05 for one in result) < 0.07 * tries


def test_a_clear_difference_is_found_and_the_interval_has_it() -> None:
    rng = np.random.default_rng(3)
    hardness = rng.normal(size=400)
    first, second = (trials(rng, skill, hardness, seeds=5, of_seeds=0.02) for skill in (0.5, 1.2))
    result = difference_of_examples("accuracy", first, second, "x")
    assert result.p < 0.001 and result.low > 0
    values = first[..., 0].mean(1), second[..., 0].mean(1)
    assert result.estimate == pytest.approx(values[1].mean() - values[0].mean())
    assert result.low < result.estimate < result.high
    assert result == difference_of_examples("accuracy", first, second, "x"), "the draws depend on the key alone"


def test_several_trials_of_a_seed_count_as_one_with_their_mean() -> None:
    rng = np.random.default_rng(7)
    hardness = rng.normal(size=200)
    first, second = (trials(rng, skill, hardness, seeds=6) for skill in (0.5, 0.9))
    seeds = [0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 3, 3]
    result = difference_of_examples("accuracy", first, second, "x", seeds)
    sides = zip((first, second), seeds, strict=True)
    means = [
        np.stack([side[[i for i, number in enumerate(of_side) if number == seed]].mean(0) for seed in set(of_side)])
        for side, of_side in sides
    ]
    expected = difference_of_examples("accuracy", *means, key="x")
    assert result.seeds == (3, 4) and result.estimate == pytest.approx(expected.estimate)
    # The draws differ, for the examples are grouped by their statistics.
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high), abs=0.01)


def test_without_a_spread_over_seeds_the_interval_is_that_of_the_paired_bootstrap() -> None:
    rng = np.random.default_rng(4)
    right = (rng.random((2, 500)) < [[0.7], [0.75]]).astype(np.float64)
    tables = np.stack([right, np.ones_like(right)], -1)
    result = difference_of_examples("accuracy", tables[:1], tables[1:], "x")
    deltas = right[1] - right[0]
    margin = 1.96 * deltas.std() / math.sqrt(500)
    assert (result.low, result.high) == pytest.approx((deltas.mean() - margin, deltas.mean() + margin), rel=0.05)
    assert result.seeds == (1, 1) and "500 test examples alone" in basis(result)


def test_pairing_examples_sees_what_two_separate_intervals_do_not() -> None:
    hard = np.arange(400) % 2.0
    better = hard.copy()
    better[::80] = 1
    tables = np.stack([np.stack([side, np.ones_like(side)], -1)[None] for side in (hard, better)])
    result = difference_of_examples("accuracy", *tables, key="x")
    assert result.estimate == pytest.approx(5 / 400) and result.p < 0.05
    # Unpaired, the standard error is over twice the difference.
    assert 2 * math.sqrt(0.25 / 400) > 3 * result.estimate


def test_the_same_trials_do_not_differ() -> None:
    table = trials(np.random.default_rng(5), 0.8, np.zeros(50))
    result = difference_of_examples("accuracy", table, table, "x")
    assert result.estimate == 0 and result.p == 1.0
    assert difference_of_examples("accuracy", table[:1], table[:1], "x").p == 1.0


@pytest.mark.parametrize("examples", [1, 2, 4, 12])
def test_p_values_are_bounded_by_the_number_of_examples(examples: int) -> None:
    right = np.stack([np.ones((2, examples)), np.ones((2, examples))], -1)
    result = difference_of_examples("accuracy", right * [0, 1], right, "x")
    # Of all ways to exchange the two sides' answers, two are as extreme.
    assert result.estimate == 1 and result.p == 2.0 ** (1 - examples)
    assert math.isfinite(result.high) == (examples == 12)
    assert amount(result, "accuracy").startswith("100.0 points") and "inf" not in amount(result, "accuracy")


@pytest.mark.parametrize("size", [0.01, 0.02, 0.03])
def test_the_uncertainties_of_examples_and_seeds_add_up(size: float) -> None:
    # Two examples and two seeds: each part is Cauchy's distribution, and their sum is one of the sum of their scales.
    of_examples, of_seeds = 0.02, 0.04
    scores = [[0.5 - sign * of_seeds - of_examples, 0.5 - sign * of_seeds + of_examples] for sign in (1, -1)]
    tables = [np.stack([np.array(side), np.ones((2, 2))], -1) for side in (scores, np.full((2, 2), 0.5 + size))]
    result = difference_of_examples("SQuAD F1", *tables, key="x")
    assert result.p == pytest.approx(2 / math.pi * math.atan((of_examples + of_seeds) / size), rel=0.02)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e60])
def test_the_interval_is_in_the_units_of_the_scores(scale: float) -> None:
    result = difference_of_seeds([scale * 0.5, scale * 0.6, scale * 0.7], [scale * 0.9] * 3)
    assert result is not None and result.high - result.estimate == pytest.approx(
        scale * 4.3027 * 0.1 / math.sqrt(3), 1e-4
    )


def test_seeds_that_agree_within_rounding_do_not_give_certainty() -> None:
    agreed = difference_of_seeds([0.6, 0.6, 0.6 + 1e-16], [0.7, 0.7, 0.7])
    assert agreed is not None and agreed.p == pytest.approx(0.1), "one of 20 orders of six, on either side"


def test_welch_by_hand_and_too_few_seeds() -> None:
    result = difference_of_seeds([0.5, 0.6, 0.7], [0.9, 0.9, 0.9])
    # A standard error of 0.1 / sqrt(3) with 2 degrees of freedom, whose t is 4.3027.
    assert result is not None and result.estimate == pytest.approx(0.3) and result.examples is None
    assert result.high - result.estimate == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert difference_of_seeds([0.5], [0.9, 0.8]) is None and difference_of_seeds([], [0.9, 0.8]) is None


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_no_correction_and_bonferroni(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1.0, p * len(p_values)) + 1e-12
    assert [q for _, q in sorted(zip(p_values, adjusted, strict=True))] == sorted(adjusted)


def test_sentences() -> None:
    result = difference_of_seeds([0.5, 0.6, 0.7], [0.9, 0.9, 0.9])
    assert result is not None
    names = ("A", "B")
    assert sentence(names, "glue/sst2", "accuracy", True, result, 0.01) == (
        "B is better on glue/sst2 by 30.0 points [5.2 to 54.8]"
    )
    swapped = difference_of_seeds([0.9, 0.9, 0.9], [0.5, 0.6, 0.7])
    assert swapped is not None
    assert sentence(names, "t", "F1", True, swapped, 0.01) == "A is better on t by 30.0 points [5.2 to 54.8]"
    assert sentence(names, "t", "F1", True, swapped, 0.06) == (
        "no significant difference on t (-30.0 points [-54.8 to -5.2])"
    )
    assert sentence(names, "t", "perplexity", False, swapped, 0.01) == "B is better on t by 0.300 [0.052 to 0.548]"
    assert "seeds alone" in basis(result) and amount(result, "F1", -1) == "-30.0 points [-54.8 to -5.2]"


@pytest.mark.parametrize("nats", [75, 350, 690])
def test_perplexities_of_any_size_are_judged_alike(nats: float) -> None:
    """A constant number of additional nats for each word multiplies every perplexity by one factor."""
    rng = np.random.default_rng(7)
    words = np.full((3, 40, 1), 128.0)
    first, second = (
        np.concatenate([words * level + rng.normal(size=words.shape) * 10, words], -1) for level in (3.0, 3.1)
    )
    more = np.array([128.0 * nats, 0.0])
    usual, large = (
        difference_of_examples("perplexity", *sides, key="x")
        for sides in ((first, second), (first + more, second + more))
    )
    times = math.exp(nats)
    assert large.p == pytest.approx(usual.p, rel=1e-6)
    assert (large.estimate, large.low, large.high) == pytest.approx(
        (usual.estimate * times, usual.low * times, usual.high * times), rel=1e-6
    )
    one, other = (difference_of_seeds([1 * size, 2 * size], [5 * size, 7 * size]) for size in (1.0, 1e300))
    assert one and other and (other.p, other.high) == pytest.approx((one.p, one.high * 1e300))
