"""The metrics against values worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.eval.metrics.score import accuracy, entity_scores, from_sums, pearson, score, spearman, statistics
from multihop.eval.tasks.task import Kind, Task


def test_accuracy() -> None:
    assert accuracy(np.array([0.0, 1, 2, 2]), np.array([0.0, 1, 1, 2])) == 0.75


def test_an_entity_counts_only_when_both_ends_and_the_type_are_right() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC", "O"], ["B-ORG", "I-ORG", "I-ORG", "B-MISC"]]
    result = [["B-PER", "I-PER", "O", "B-ORG", "O"], ["B-ORG", "I-ORG", "O", "B-MISC"]]
    # Right: the person and MISC. Wrong type: LOC as ORG. Wrong end: the ORG. 2 of 4 found, 2 of 4 right.
    f1, others = entity_scores(result, gold)
    assert (f1, others) == (0.5, {"precision": 0.5, "recall": 0.5})


def test_entities_that_touch_and_labels_out_of_order_are_read_as_conlleval_reads_them() -> None:
    gold = [["B-PER", "B-PER", "O", "B-LOC", "I-LOC"]]
    # I-LOC after O begins an entity in conlleval; two touching people are not one.
    result = [["B-PER", "I-PER", "O", "I-LOC", "I-LOC"]]
    f1, others = entity_scores(result, gold)
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


def _task(kind: Kind, metric: str, labels: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> Task:
    return Task("made up", kind, metric, True, "", labels, other_metrics=others)


def _each(values: list[float]) -> list[np.ndarray]:
    return [np.array([value], np.float64) for value in values]


def test_each_kind_of_task_gets_its_metric_and_a_reference() -> None:
    one, other = _each([0, 1, 1, 1]), _each([0, 0, 1, 1])
    assert score(_task("classification", "accuracy", ("a", "b")), other, one) == (0.75, {"largest class": 0.75})
    value, others = score(_task("regression", "Pearson"), other, one)
    assert value == others["Spearman"] == pytest.approx(1 / math.sqrt(3))
    labels = ("O", "B-PER", "I-PER")
    words = [np.array([1.0, 2, 0]), np.array([0.0, 1])]
    assert score(_task("tagging", "entity F1", labels), words, words)[0] == 1.0
    wrong = [np.array([1.0, 2, 0]), np.array([0.0, 2])]
    assert score(_task("tagging", "accuracy", labels), wrong, words) == (0.8, {})


def test_a_task_has_all_the_metrics_that_it_officially_reports() -> None:
    # 1 true positive, 1 false positive, 1 false negative, 2 true negatives.
    result, gold = _each([1, 1, 0, 0, 0]), _each([1, 0, 1, 0, 0])
    task = _task("classification", "F1", ("a", "b"), ("accuracy", "Matthews", "macro F1"))
    value, others = score(task, result, gold)
    assert value == 0.5 and others["accuracy"] == 0.6
    assert others["Matthews"] == pytest.approx((1 * 2 - 1 * 1) / math.sqrt(2 * 2 * 3 * 3))
    assert others["macro F1"] == pytest.approx((0.5 + 4 / 6) / 2)
    # 12 nats over 8 tokens; the mean of two answers.
    nats, tokens = _each([4, 8]), _each([2, 6])
    assert score(_task("zero-shot", "perplexity"), nats, tokens)[0] == pytest.approx(math.exp(1.5))
    spans = _task("spans", "SQuAD F1", others=("exact match",))
    assert score(spans, _each([0.5, 1]), _each([0, 0])) == (0.75, {"exact match": 0.75})


@pytest.mark.parametrize("metric", ["F1", "Matthews", "Pearson", "Spearman"])
@pytest.mark.parametrize(("predicted", "gold"), [([0] * 4, [0, 0, 1, 1]), ([0] * 4, [0] * 4), ([0, 0, 1, 1], [0] * 4)])
def test_what_is_undefined_is_zero_as_in_the_official_scripts(
    metric: str, predicted: list[float], gold: list[float], recwarn: pytest.WarningsRecorder
) -> None:
    task = _task("classification" if metric in ("F1", "Matthews") else "regression", metric, ("a", "b"))
    assert score(task, _each(predicted), _each(gold))[0] == 0.0
    assert from_sums(metric, statistics(metric, task, _each(predicted), _each(gold)).sum(0)) == 0.0
    assert not recwarn.list


NUMBERS = st.integers(-50, 50).map(lambda n: n / 8)


@given(st.sampled_from(["Pearson", "Spearman"]), st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=30))
def test_sums_give_the_correlations_of_the_library(metric: str, pairs: list[tuple[float, float]]) -> None:
    _sums_give_the_score(_task("regression", metric), *map(list, zip(*pairs, strict=True)))


@given(
    st.sampled_from([("accuracy", 5), ("macro F1", 5), ("F1", 2), ("Matthews", 2)]).flatmap(
        lambda chosen: st.tuples(
            st.just(chosen),
            st.lists(st.tuples(*[st.integers(0, chosen[1] - 1)] * 2), min_size=1, max_size=30),
        )
    )
)
def test_sums_give_the_scores_of_classes_of_the_library(drawn: tuple[tuple[str, int], list[tuple[int, int]]]) -> None:
    (metric, classes), pairs = drawn
    task = _task("classification", metric, tuple("abcde"[:classes]))
    _sums_give_the_score(task, *map(list, zip(*pairs, strict=True)))


def _sums_give_the_score(task: Task, result: list[float], gold: list[float]) -> None:
    each = statistics(task.metric, task, _each(result), _each(gold))
    assert each.shape[0] == len(gold)
    assert from_sums(task.metric, each.sum(0)) == pytest.approx(score(task, _each(result), _each(gold))[0], abs=1e-9)
    many = from_sums(task.metric, np.stack([each.sum(0), 3 * each.sum(0)]))
    assert many == pytest.approx(np.full(2, many[0])), "what is repeated evenly has the same score"


@given(st.lists(st.lists(st.tuples(*[st.integers(0, 4)] * 2), min_size=1, max_size=8), min_size=1, max_size=6))
def test_sums_give_the_entity_f1_of_seqeval(sentences: list[list[tuple[int, int]]]) -> None:
    task = _task("tagging", "entity F1", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))
    result, gold = ([np.array([pair[side] for pair in line], float) for line in sentences] for side in (0, 1))
    sums = statistics("entity F1", task, result, gold).sum(0)
    assert from_sums("entity F1", sums) == pytest.approx(score(task, result, gold)[0])
