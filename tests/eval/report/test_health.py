"""The diagnosis is one sentence for a run with a plateau or a collapse, and None for a run that learns."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.eval.report.run_metrics import diagnosis
from multihop.pretrain.config import OptimizerConfig, PhaseConfig
from multihop.pretrain.models.config import EncoderConfig

Row = dict[str, Any]
Numbers = tuple[float, float, float]
"""Values of unigram_gain, hidden_cosine and hidden_rank."""

# Measured on two small models, every 40 steps: a BERT and a GPT-2 with 2 layers and hidden size 128.
COLLAPSED: list[Numbers] = [
    (-0.3326, 0.17, 0.85), (-0.0311, 1.00, 0.01), (-0.0243, 0.96, 0.10), (-0.0133, 0.70, 0.08), (-0.0099, 0.68, 0.10),
    (-0.0069, 0.66, 0.11),
]  # fmt: skip
LEARNING: list[Numbers] = [
    (-0.3024, 0.05, 0.78), (0.0174, 0.63, 0.05), (0.0660, 0.41, 0.09), (0.1007, 0.30, 0.13), (0.1145, 0.28, 0.15),
    (0.1175, 0.25, 0.16),
]  # fmt: skip
GENTLE: list[Numbers] = [
    (-0.3326, 0.17, 0.85), (-0.0971, 0.95, 0.37), (-0.0189, 0.95, 0.32), (-0.0120, 0.62, 0.64), (-0.0085, 0.56, 0.67),
    (-0.0054, 0.48, 0.70),
]  # fmt: skip


def evaluations(numbers: list[Numbers], every: int = 40) -> list[Row]:
    return [
        {
            "step": every * i,
            "unigram_gain": gain,
            "hidden_cosine": cosine,
            "hidden_rank": rank,
            "attention_entropy": 0.8,
        }
        for i, (gain, cosine, rank) in enumerate(numbers)
    ]


def flat(gain: float, count: int = 6, every: int = 100) -> list[Row]:
    return evaluations([(gain, 0.2, 0.7)] * count, every)


def rates(*by_step: tuple[int, float]) -> list[Row]:
    return [{"step": step, "lr": rate, "loss": 7.0} for step, rate in by_step]


def test_a_collapse_is_told_with_its_numbers() -> None:
    told = diagnosis(evaluations(COLLAPSED))
    assert told is not None and "have collapsed" in told and "plateau" not in told
    assert "step 200 the mean cosine between different tokens is 0.66, and the effective rank 11%" in told


def test_few_directions_without_a_gain_are_a_collapse_whatever_the_cosine() -> None:
    assert "have collapsed" in (diagnosis(evaluations([(-0.021, 0.47, 0.014)] * 4)) or "")
    assert diagnosis(evaluations([(0.021, 0.47, 0.014)] * 4)) is None


@pytest.mark.parametrize("numbers", [LEARNING, GENTLE], ids=["learning", "gentle"])
def test_runs_that_are_well_are_told_nothing_at_any_time(numbers: list[Numbers]) -> None:
    rows = evaluations(numbers)
    assert all(diagnosis(rows[:count]) is None for count in range(len(rows) + 1))


def test_a_plateau_is_told_once_it_has_lasted() -> None:
    told = [diagnosis(flat(-0.01)[:count]) for count in range(7)]
    assert told[:3] == [None] * 3 and all(told[4:])
    assert told[6] is not None
    assert "from step 300 to step 500 its held-out loss went from 1.0% above to 1.0% above that of a model" in told[6]


def test_a_loss_that_falls_or_has_left_the_plateau_is_no_plateau() -> None:
    assert diagnosis(flat(0.05)) is None
    assert diagnosis(evaluations([(-0.06 + 0.01 * i, 0.2, 0.7) for i in range(6)], 100)) is None
    left = flat(-0.01)
    left[-1]["unigram_gain"] = 0.03
    assert diagnosis(left) is None


def test_only_evaluations_after_the_newest_warm_up_count() -> None:
    sick = evaluations(COLLAPSED)
    assert diagnosis(rates((20, 1e-3), (100, 2e-3), (200, 1e-3)) + sick) is not None
    assert diagnosis(rates((20, 1e-3), (100, 1e-3), (140, 2e-3)) + sick) is None
    second_phase = rates((20, 2e-3), (100, 1e-3), (160, 2e-3), (200, 1e-3))
    assert diagnosis(second_phase + sick) is None


def test_rows_of_older_versions_and_repeated_steps() -> None:
    assert diagnosis([]) is None
    assert diagnosis([{"step": step, "heldout_loss": 6.9, "unigram_loss": 6.9} for step in range(0, 900, 100)]) is None
    again = [{**row, "hidden_cosine": 0.0} for row in evaluations(COLLAPSED)]
    assert diagnosis(evaluations(COLLAPSED) + again) == diagnosis(evaluations(COLLAPSED))


def test_not_a_number_is_no_diagnosis() -> None:
    nan = float("nan")
    assert diagnosis(evaluations([(nan, nan, nan)] * 9, 100)) is None


@given(st.lists(st.tuples(st.floats(-0.5, 1), st.floats(-1, 1), st.floats(0, 1)), max_size=9), st.integers(1, 500))
def test_what_is_told_is_true_of_the_newest_evaluations(numbers: list[Numbers], every: int) -> None:
    rows = evaluations(numbers, every)
    told = diagnosis(rows) or ""
    newest = rows[1:][-3:]
    if "plateau" in told:
        assert all(row["unigram_gain"] < 0.02 for row in newest)
    if "collapsed" in told:
        assert all(row["hidden_rank"] < 0.2 for row in newest) and len(newest) == 3
    if len(newest) == 3 and all(row["hidden_cosine"] > 0.5 and row["hidden_rank"] < 0.2 for row in newest):
        assert "collapsed" in told


def test_the_keys_to_try_exist() -> None:
    sections = {"phases": PhaseConfig, "optimizer": OptimizerConfig, "model": EncoderConfig}
    keys = re.findall(r"(\w+)(?:\[\])?\.([a-z_]+)", diagnosis(flat(0.0)) or "")
    assert len(keys) == 6 and all(key in sections[section].model_fields for section, key in keys)
