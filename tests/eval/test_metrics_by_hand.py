"""The metrics against values worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.metrics import accuracy, entity_scores, pearson, score, spearman
from eval.tasks import Task


def test_accuracy() -> None:
    assert accuracy(np.array([0.0, 1, 2, 2]), np.array([0.0, 1, 1, 2])) == 0.75


def test_an_entity_counts_only_when_both_ends_and_the_type_are_right() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC", "O"], ["B-ORG", "I-ORG", "I-ORG", "B-MISC"]]
    found = [["B-PER", "I-PER", "O", "B-ORG", "O"], ["B-ORG", "I-ORG", "O", "B-MISC"]]
    # Right: the person and MISC. Wrong type: LOC as ORG. Wrong end: the ORG. 2 of 4 found, 2 of 4 right.
    f1, others = entity_scores(found, gold)
    assert (f1, others) == (0.5, {"precision": 0.5, "recall": 0.5})


def test_entities_that_touch_and_labels_out_of_order_are_read_as_conlleval_reads_them() -> None:
    gold = [["B-PER", "B-PER", "O", "B-LOC", "I-LOC"]]
    # I-LOC after O begins an entity in conlleval; two touching people are not one.
    found = [["B-PER", "I-PER", "O", "I-LOC", "I-LOC"]]
    f1, others = entity_scores(found, gold)
    assert others == {"precision": 0.5, "recall": pytest.approx(1 / 3)}
    assert f1 == pytest.approx(2 * 0.5 * (1 / 3) / (0.5 + 1 / 3))


def test_entity_scores_of_nothing_are_zero_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert entity_scores([["O", "O"]], [["B-PER", "O"]]) == (0.0, {"precision": 0.0, "recall": 0.0})
    assert not recwarn.list


def test_correlations() -> None:
    x, y = np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 5])
    # Deviations (-1.5, -0.5, 0.5, 1.5) and (-1.75, 0.25, -0.75, 2.25): 5.5 / sqrt(5 * 8.75).
    assert pearson(x, y) == pytest.approx(5.5 / math.sqrt(5 * 8.75))
    # Ranks (1, 2, 3, 4) and (1, 3, 2, 4): 1 - 6 * 2 / (4 * 15).
    assert spearman(x, y) == pytest.approx(0.8)
    # Equal values share the mean of their ranks: (1.5, 1.5, 3, 4) against (1, 2, 3, 4).
    assert spearman(np.array([7.0, 7, 8, 9]), x) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_a_constant_prediction_correlates_with_nothing() -> None:
    assert pearson(np.full(5, 0.3), np.arange(5.0)) == 0.0
    assert spearman(np.full(5, 0.3), np.arange(5.0)) == 0.0


@given(
    st.lists(st.integers(-1000, 1000), min_size=3, max_size=20, unique=True).flatmap(
        lambda x: st.tuples(st.just(x), st.permutations(x))
    ),
    st.floats(0.1, 10),
    st.floats(-5, 5),
)
def test_correlations_know_no_scale(pair: tuple[list[int], list[int]], factor: float, shift: float) -> None:
    x, y = np.array(pair[0], float), np.array(pair[1], float)
    assert pearson(x * factor + shift, y) == pytest.approx(pearson(x, y), abs=1e-9)
    assert spearman(np.sign(x) * x**2, y) == pytest.approx(spearman(x, y), abs=1e-9)
    assert -1 - 1e-9 <= pearson(x, y) <= 1 + 1e-9


def _task(kind: str, metric: str, labels: tuple[str, ...] = ()) -> Task:
    return Task("made up", kind, metric, True, "", labels)  # type: ignore[arg-type]


def test_each_kind_of_task_gets_its_metric_and_a_reference() -> None:
    one = [np.array([v]) for v in (0.0, 1.0, 1.0, 1.0)]
    other = [np.array([v]) for v in (0.0, 0.0, 1.0, 1.0)]
    assert score(_task("classification", "accuracy", ("a", "b")), other, one) == (0.75, {"largest class": 0.75})
    value, others = score(_task("regression", "Pearson"), other, one)
    assert value == others["Spearman"] == pytest.approx(1 / math.sqrt(3))
    labels = ("O", "B-PER", "I-PER")
    words = [np.array([1.0, 2, 0]), np.array([0.0, 1])]
    assert score(_task("tagging", "entity F1", labels), words, words)[0] == 1.0
