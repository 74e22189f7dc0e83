"""The verdict on pretraining follows from the results, also when they are bad."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.eval.statistics.formatting import show, spread
from multihop.eval.statistics.verdict import Verdict, task_results, verdicts

NOWHERE = Path("/nonexistent")


def rows_of(pretrained: list[float], random: list[float], **other: Any) -> list[dict[str, Any]]:
    """Return rows of one task; the development score of a trial is its value minus 0.01 per seed."""
    base = {
        "task": "t", "kind": "classification", "metric": "accuracy", "higher_is_better": True, "status": "ok",
        "source": "", "notes": "", "other_metrics": {}, **other,
    }  # fmt: skip
    return [
        {**base, "init": init, "seed": seed, "value": value, "dev_value": value - 0.01 * seed, "key": f"{init}{seed}"}
        for init, values in (("pretrained", pretrained), ("random", random))
        for seed, value in enumerate(values)
    ]


def judged(pretrained: list[float], random: list[float], run_dir: Path = NOWHERE, **other: Any) -> Verdict:
    [found] = verdicts(task_results(rows_of(pretrained, random, **other), run_dir))
    return found


@pytest.mark.parametrize(
    ("pretrained", "random", "expected"),
    [
        ([0.9, 0.92, 0.88], [0.5, 0.6, 0.55], "helped"),
        ([0.5, 0.6, 0.55], [0.9, 0.92, 0.88], "did not help"),
        ([0.8, 0.9, 0.5], [0.6, 0.6, 0.7], "inconclusive"),
        ([0.31, 0.36, 0.33], [0.30, 0.32, 0.29], "inconclusive"),
        ([0.5, 0.5], [0.5, 0.5], "inconclusive"),
        ([0.9], [0.1], "inconclusive"),
        ([], [0.1, 0.2], "inconclusive"),
        ([0.9, 0.8], [], "inconclusive"),
    ],
)
def test_a_verdict_needs_more_than_the_spread_over_seeds(
    pretrained: list[float], random: list[float], expected: str
) -> None:
    assert judged(pretrained, random).outcome == expected


values = st.lists(st.floats(0, 1), min_size=2, max_size=4)


@given(values, values)
def test_swapping_the_sides_swaps_the_verdict_and_so_does_a_metric_that_is_better_low(
    ours: list[float], theirs: list[float]
) -> None:
    swapped = {"helped": "did not help", "did not help": "helped", "inconclusive": "inconclusive"}
    found = judged(ours, theirs).outcome
    assert judged(theirs, ours).outcome == swapped[found]
    assert judged(ours, theirs, higher_is_better=False).outcome == swapped[found]


def test_what_a_verdict_rests_on_is_reported_in_words() -> None:
    helped = judged([0.9, 0.92, 0.88], [0.5, 0.6, 0.55]).sentence
    assert "accuracy 0.900 with pretraining, 0.550 without; better with pretraining by 35.0 points [" in helped
    assert "based on the seeds alone, without files of predictions" in helped
    assert "worse with pretraining by 35.0 points [" in judged([0.5, 0.6, 0.55], [0.9, 0.92, 0.88]).sentence
    assert "the difference is not significant (1.0 points [" in judged([0.5, 0.8], [0.6, 0.68]).sentence
    assert "at least two seeds on each side are needed" in judged([0.9], [0.1, 0.2]).sentence
    assert "There is no result with pretraining" in judged([], [0.1]).sentence


def test_files_of_predictions_bring_the_test_examples_in(tmp_path: Path) -> None:
    folder = tmp_path / "eval" / "predictions"
    folder.mkdir(parents=True)
    for init, right in (("pretrained", 20), ("random", 18)):
        for seed in range(2):
            table = [[float(i < right), 1.0] for i in range(24)]
            (folder / f"{init}{seed}.json").write_text(json.dumps({"statistics": table, "targets": [0] * 24}))
    few = judged([20 / 24] * 2, [18 / 24] * 2, tmp_path)
    assert few.outcome == "inconclusive" and "based on 24 test examples and 2 + 2 seeds" in few.sentence
    assert "the difference is not significant (8.3 points [-" in few.sentence
    alone = judged([0.83, 0.835, 0.825], [0.75, 0.755, 0.745])
    assert alone.outcome == "helped", "the seeds do not know how few examples there are"
    none = judged([20 / 24] * 2, [18 / 24] * 2)
    assert none.outcome == "inconclusive" and "is not significant (8.3 points)" in none.sentence, (
        "two seeds that agree by chance"
    )


@pytest.mark.parametrize("examples", [1, 2, 5, 9])
def test_a_handful_of_test_examples_gives_no_verdict(examples: int, tmp_path: Path) -> None:
    folder = tmp_path / "eval" / "predictions"
    folder.mkdir(parents=True)
    for init, right in (("pretrained", 1.0), ("random", 0.0)):
        for seed in range(3):
            content = {"statistics": [[right, 1.0]] * examples, "targets": [0] * examples}
            (folder / f"{init}{seed}.json").write_text(json.dumps(content))
    found = judged([1.0] * 3, [0.0] * 3, tmp_path)
    assert found.outcome == "inconclusive"
    assert f"at least 10 test examples instead of {examples} are needed" in found.sentence


def test_many_tasks_need_more_than_one() -> None:
    one = rows_of([0.70, 0.74, 0.72], [0.62, 0.66, 0.67])
    assert verdicts(task_results(one, NOWHERE))[0].outcome == "helped"
    many = [{**row, "task": f"t{n}"} for n in range(10) for row in one]
    assert {found.outcome for found in verdicts(task_results(many, NOWHERE))} == {"inconclusive"}


@pytest.mark.parametrize(
    ("pretrained", "expected"), [(200.0, "helped"), (700.0, "did not help"), (9000.0, "did not help")]
)
def test_perplexity_is_judged_by_the_unigram_model(pretrained: float, expected: str) -> None:
    zero_shot = {"kind": "zero-shot", "metric": "perplexity", "higher_is_better": False}
    found = judged([pretrained], [8100.0], **zero_shot, other_metrics={"unigram perplexity": 600.0})
    assert found.outcome == expected


def test_a_zero_shot_score_has_no_seeds_and_is_judged_by_its_examples(tmp_path: Path) -> None:
    zero_shot = {"kind": "zero-shot"}
    assert "files of predictions are needed" in judged([0.9], [0.5], **zero_shot).sentence
    folder = tmp_path / "eval" / "predictions"
    folder.mkdir(parents=True)
    for init, right in (("pretrained0", 90), ("random0", 50)):
        table = [[float(i < right), 1.0] for i in range(100)]
        (folder / f"{init}.json").write_text(json.dumps({"statistics": table, "targets": []}))
    found = judged([0.9], [0.5], tmp_path, **zero_shot)
    assert found.outcome == "helped" and "40.0 points [30." in found.sentence


def test_the_table_line() -> None:
    rows = rows_of([0.7, 0.95, 0.9], [0.5, 0.4])
    rows[2].update(status="failed", value=None, dev_value=None, error="diverged")
    [result] = task_results(rows, NOWHERE)
    assert result.pretrained is not None and result.random is not None
    assert (result.values("pretrained"), result.pretrained.chosen.failed) == ([0.7, 0.95], 1)
    assert result.difference is not None and result.difference.estimate == pytest.approx(0.825 - 0.45)
    assert result.best is not None and result.best["seed"] == 1


def test_the_planned_checkpoint_is_judged_and_earlier_ones_are_kept() -> None:
    asked, earlier = ([{**row, "checkpoint_step": n} for row in rows_of([n / 100], [])] for n in (20, 10))
    [result] = task_results(asked, NOWHERE, earlier)
    assert result.values("pretrained") == [0.2] and list(result.by_step) == [10, 20]


def test_numbers() -> None:
    assert [show(v) for v in (None, 0.12345, 9.9999, 1234.56, -0.5)] == ["none", "0.123", "10.000", "1,234.6", "-0.500"]
    assert spread([]) == "none" and spread([0.5]) == "0.500"
    assert spread([0.9, 0.1, 0.2, 0.4]) == "0.300 [0.100 to 0.900]"
