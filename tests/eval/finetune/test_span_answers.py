"""From logits to answers: the best spans of several windows, no answer, the threshold and the written files."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.eval.finetune.official_files import N_BEST, NULL_ODDS, PREDICTIONS, n_best, official_files
from multihop.eval.finetune.span_answers import Answer, Span, answer_questions, best_threshold, predicted_texts
from multihop.eval.finetune.span_windows import Window
from multihop.eval.tasks.task import Example

_CONTEXT = "a0 b1 c2 d3 e4 f5 g6 h7"


def _window(example: int, first: int, widest: list[bool], null: int = 0) -> Window:
    """Return a window: [CLS] question [SEP], a token for each word of the context from the `first` one on, [SEP]."""
    starts = 3 * (first + np.arange(len(widest)))
    ids = np.zeros(4 + len(widest), np.int64)
    return Window(example, ids, 3, starts, starts + 2, np.array(widest), null, null, null)


def _two_windows() -> list[Window]:
    return [_window(0, 0, [True, True, True, True, False]), _window(0, 2, [False, False, True, True, True, True])]


def _logits(window: Window, *points: tuple[int, int, float]) -> NDArray[np.float64]:
    logits = np.full((len(window.ids), 2), -10.0)
    for at, column, value in points:
        logits[at, column] = value
    return logits


def test_the_best_span_of_all_windows_is_the_original_text() -> None:
    first, second = _two_windows()
    one = _logits(first, (4, 0, 3.0), (5, 1, 2.0), (0, 0, 1.0), (0, 1, 1.0))
    # The span of the second window begins at a token with more context in the first one.
    two = _logits(second, (3, 0, 50.0), (6, 0, 2.0), (7, 1, 2.5), (0, 0, 0.5), (0, 1, 0.0))
    [answer] = answer_questions([Example(("?", _CONTEXT))], [first, second], [one, two])
    assert answer.spans[0] == Span("b1 c2", 3.0, 2.0)
    assert answer.spans[1] == Span("f5 g6", 2.0, 2.5)
    assert answer.null == Span("", 0.5, 0.0) and answer.null_odds == -4.5
    assert len({span.text for span in answer.spans}) == len(answer.spans)


def test_no_span_ends_before_it_begins_is_too_long_or_leaves_the_context() -> None:
    [window] = windows = [_window(0, 0, [True] * 4)]
    logits = _logits(window, (5, 0, 9.0), (4, 1, 9.0), (0, 0, 99.0), (2, 0, 99.0), (7, 1, 99.0), (3, 0, 8.0))
    [answer] = answer_questions([Example(("?", _CONTEXT))], windows, [logits], max_tokens=2)
    assert answer.spans[0] == Span("a0 b1", 8.0, 9.0)
    assert {span.text for span in answer.spans} == {"a0", "b1", "c2", "d3", "a0 b1", "b1 c2", "c2 d3"}


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 6), st.integers(1, 40))
def test_every_span_is_compared(seed: int, width: int, max_tokens: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    windows = [_window(0, 0, rng.random(width).round().astype(bool).tolist()), _window(0, 0, [True] * width)]
    logits = [rng.normal(size=(width + 4, 2)) for _ in windows]
    [answer] = answer_questions([Example(("?", _CONTEXT))], windows, logits, count, max_tokens)
    best: dict[str, float] = {}
    for window, values in zip(windows, logits, strict=True):
        for i in np.flatnonzero(window.has_max_context):
            for j in range(i, min(width, i + max_tokens)):
                text = _CONTEXT[window.starts[i] : window.ends[j]]
                best[text] = max(best.get(text, -np.inf), values[3 + i, 0] + values[3 + j, 1])
    scores = sorted(best.values(), reverse=True)
    assert answer.spans[0].score == pytest.approx(scores[0])
    assert all(best[span.text] == pytest.approx(span.score) for span in answer.spans)
    # Two windows may have the same span among their best: then there are fewer different ones.
    assert min(count, len(scores)) / 2 <= len(answer.spans) <= min(count, len(scores))


def test_examples_keep_their_order_and_logits_that_are_not_finite_are_refused() -> None:
    examples = [Example(("?", _CONTEXT), (), "q1"), Example(("?", _CONTEXT), (), "q2")]
    windows = [_window(1, 0, [True]), _window(0, 1, [True], null=4)]
    logits = [_logits(windows[0], (0, 0, 1.0)), _logits(windows[1], (4, 1, 2.0))]
    one, two = answer_questions(examples, windows, logits)
    assert (one.spans[0].text, two.spans[0].text) == ("b1", "a0")
    assert (one.null, two.null) == (Span("", -10.0, 2.0), Span("", 1.0, -10.0))
    logits[0][2, 0] = np.nan
    with pytest.raises(UserError, match=r"question q2 has logits that are not finite"):
        answer_questions(examples, windows, logits)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_no_threshold_is_better(rows: list[tuple[int, int, int]]) -> None:
    odds, answered, abstained = (np.array(column, float) for column in zip(*rows, strict=True))

    def mean(threshold: float) -> float:
        return float(np.where(odds > threshold, abstained, answered).mean())

    threshold = best_threshold(odds, answered, abstained)
    assert np.isfinite(threshold)
    assert mean(threshold) == max(map(mean, [-4.0, *odds]))


def test_the_threshold_by_hand() -> None:
    odds = np.array([-2.0, 1.0, 3.0, 4.0])
    answered, abstained = np.array([0.5, 0.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0, 1.0])
    # Answer the first: 0.5 + 1 + 0 + 1. The first three: 0.5 + 0 + 1 + 1, which is the same: the lower threshold.
    assert best_threshold(odds, answered, abstained) == -2.0
    assert best_threshold(odds, answered, np.array([0.0, 0.0, 0.0, 1.0])) == 3.0


def _answer(text: str, score: float, null: float) -> Answer:
    return Answer((Span(text, score, 0.0), Span(text + " x", score - 1, 0.0)), Span("", null, 0.0))


def test_no_answer_is_given_above_the_threshold_only() -> None:
    answers = [_answer("a", 1.0, 2.0), _answer("b", 1.0, 3.0)]
    assert predicted_texts(answers, 1.0) == ["a", ""]
    assert predicted_texts(answers, None) == ["a", "b"]


def test_the_official_files() -> None:
    examples = [Example(("?", "é"), (), "56be01"), Example(("?", "é"), (), "56be02")]
    answers = [_answer("é", 1.0, 0.0), _answer("b", 1.0, 3.0)]
    read = {name: json.loads(text) for name, text in official_files(examples, answers, 0.5).items()}
    assert {*read} == {PREDICTIONS, N_BEST, NULL_ODDS}
    assert read[PREDICTIONS] == {"56be01": "é", "56be02": ""}
    assert read[NULL_ODDS] == {"56be01": -1.0, "56be02": 2.0}
    assert [row["text"] for row in read[N_BEST]["56be02"]] == ["", "b", "b x"]
    without = official_files(examples, answers, None)
    assert NULL_ODDS not in without and json.loads(without[PREDICTIONS]) == {"56be01": "é", "56be02": "b"}


def test_probabilities_are_a_softmax_of_the_list() -> None:
    rows = n_best(_answer("a", 800.0, 799.0), True)
    e = np.exp(-1.0)
    assert [row["text"] for row in rows] == ["a", "a x", ""]
    assert [row["probability"] for row in rows] == pytest.approx([1 / (1 + 2 * e), e / (1 + 2 * e), e / (1 + 2 * e)])
    assert sum(row["probability"] for row in n_best(_answer("a", 8.0, 7.0), False)) == pytest.approx(1.0)  # type: ignore[misc]
