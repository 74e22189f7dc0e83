"""What is said of pretraining follows from the numbers, also when they are bad."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.verdict import chance_of_no_overlap, newest_rows, show, task_results, verdict


def rows_of(pretrained: list[float], random: list[float], **other: Any) -> list[dict[str, Any]]:
    """Rows of one task; the development score of a trial is its value less 0.01 a seed."""
    base = {
        "task": "t", "kind": "classification", "metric": "accuracy", "higher_is_better": True, "status": "ok",
        "source": "", "notes": "", "other_metrics": {}, **other,
    }  # fmt: skip
    return [
        {**base, "init": init, "seed": seed, "value": value, "dev_value": value - 0.01 * seed}
        for init, values in (("pretrained", pretrained), ("random", random))
        for seed, value in enumerate(values)
    ]


def outcome(pretrained: list[float], random: list[float], **other: Any) -> str:
    [result] = task_results(rows_of(pretrained, random, **other), ["t"])
    return verdict(result).outcome


@pytest.mark.parametrize(
    ("pretrained", "random", "expected"),
    [
        ([0.8, 0.9, 0.85], [0.5, 0.6, 0.79], "helped"),
        ([0.5, 0.6, 0.55], [0.7, 0.8, 0.75], "did not help"),
        ([0.8, 0.9, 0.5], [0.6, 0.6, 0.7], "cannot be told"),
        ([0.5, 0.6, 0.9], [0.7, 0.8, 0.75], "cannot be told"),
        ([0.5, 0.5], [0.5, 0.5], "cannot be told"),
        ([0.9], [0.1], "cannot be told"),
        ([], [0.1, 0.2], "cannot be told"),
        ([0.9, 0.8], [], "cannot be told"),
    ],
)
def test_helped_means_that_every_seed_with_it_beats_every_seed_without(
    pretrained: list[float], random: list[float], expected: str
) -> None:
    assert outcome(pretrained, random) == expected


values = st.lists(st.floats(0, 1), min_size=2, max_size=4)


@given(values, values)
def test_swapping_the_sides_swaps_the_verdict_and_so_does_a_metric_that_is_better_low(
    ours: list[float], theirs: list[float]
) -> None:
    swapped = {"helped": "did not help", "did not help": "helped", "cannot be told": "cannot be told"}
    found = outcome(ours, theirs)
    assert outcome(theirs, ours) == swapped[found]
    assert outcome(ours, theirs, higher_is_better=False) == swapped[found]
    assert (found == "helped") == (min(ours) > max(theirs))


def test_overlap_and_single_seeds_are_said_in_words() -> None:
    def sentence(pretrained: list[float], random: list[float]) -> str:
        return verdict(task_results(rows_of(pretrained, random), ["t"])[0]).sentence

    assert "worse with pretraining, but the spreads over the seeds overlap" in sentence([0.5, 0.8], [0.7, 0.75])
    assert "better with pretraining, but the spreads over the seeds overlap" in sentence([0.7, 0.8], [0.6, 0.75])
    assert "one seed on a side" in sentence([0.9], [0.1, 0.2])
    assert "accuracy 0.900 with pretraining, 0.150 without" in sentence([0.9, 0.9], [0.1, 0.2])
    assert "No trial with pretraining" in sentence([], [0.1])


@pytest.mark.parametrize(
    ("pretrained", "expected"), [(200.0, "helped"), (700.0, "did not help"), (9000.0, "did not help")]
)
def test_perplexity_is_judged_by_the_unigram_model(pretrained: float, expected: str) -> None:
    zero_shot = {"kind": "zero-shot", "metric": "perplexity", "higher_is_better": False}
    assert outcome([pretrained], [8100.0], **zero_shot, other_metrics={"unigram perplexity": 600.0}) == expected


def test_the_table_line() -> None:
    rows = rows_of([0.7, 0.95, 0.9], [0.5, 0.4])
    rows[2].update(status="failed", value=None, dev_value=None, error="diverged")
    [result] = task_results(rows, ["t"])
    assert (result.pretrained.values, result.pretrained.failed, result.random.failed) == ((0.7, 0.95), 1, 0)
    assert result.difference == pytest.approx(0.825 - 0.45)
    assert result.best is not None and result.best["seed"] == 1


def test_the_last_row_of_a_trial_counts_and_rows_that_the_recipe_does_not_ask_for_do_not() -> None:
    first, *rest = rows_of([0.1, 0.2], [0.3])
    again = {**first, "value": 0.6}
    other = [{**first, "seed": 9}, {**first, "task": "u"}]
    assert newest_rows([first, *rest, *other, again], ["t"], [0, 1]) == [again, *rest]


def test_chance_and_numbers() -> None:
    assert chance_of_no_overlap(3, 3) == pytest.approx(0.1)
    assert chance_of_no_overlap(1, 1) == 1.0
    assert [show(v) for v in (None, 0.12345, 9.9999, 1234.56, -0.5)] == ["none", "0.123", "10.000", "1,234.6", "-0.500"]
