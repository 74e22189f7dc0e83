"""Chooses the answer of each question from the logits of its windows, or none.

Devlin et al. 2018, sections 4.2 and 4.3: the score of a span is the sum of its start's and its end's logit, that of no
answer the sum of both logits of the null position; no answer is given if that exceeds the best span's by a threshold.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.eval.finetune.span_windows import Window
from multihop.eval.tasks.task import Example

Logits = NDArray[np.float32] | NDArray[np.float64]
"""(T, 2): logits of the start and of the end, for each token of a window."""


@dataclass(frozen=True)
class Span:
    """A possible answer."""

    text: str
    """The characters of the context; empty for no answer."""
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Answer:
    """The answer of one question, from all of its windows."""

    spans: tuple[Span, ...]
    """Candidates with different texts, at least one, the best first."""
    null: Span
    """No answer, by the window that supports it least: any window may hold the answer."""

    @property
    def null_odds(self) -> float:
        """The score of no answer less that of the best span, in nats."""
        return self.null.score - self.spans[0].score


def answer_questions(
    examples: Sequence[Example],
    windows: Sequence[Window],
    logits: Sequence[Logits],
    n_best: int = 20,
    max_tokens: int = 30,
) -> list[Answer]:
    """Choose the answer of each example from all of its windows.

    All spans are compared, not only those between the `n_best` starts and ends as in `run_squad.py`.

    Args:
        windows: windows of these examples, at least one of each.
        logits: logits of each window.
        n_best: maximum number of spans of an answer.
        max_tokens: maximum length of a span in tokens.

    Raises:
        UserError: a logit is infinite or NaN.
    """
    spans: dict[int, list[Span]] = defaultdict(list)
    nulls: dict[int, list[Span]] = defaultdict(list)
    for window, of_window in zip(windows, logits, strict=True):
        assert of_window.shape == (len(window.ids), 2)
        if not np.isfinite(of_window).all():
            raise UserError(f"question {examples[window.example].id} has logits that are not finite; lower eval.lr")
        spans[window.example] += _best_spans(examples[window.example].texts[1], window, of_window, n_best, max_tokens)
        nulls[window.example].append(Span("", *of_window[window.null].tolist()))
    answers = []
    for index in range(len(examples)):
        best: dict[str, Span] = {}
        for span in sorted(spans[index], key=lambda each: -each.score):
            best.setdefault(span.text, span)
        answers.append(Answer(tuple(best.values())[:n_best], min(nulls[index], key=lambda each: each.score)))
    return answers


def _best_spans(context: str, window: Window, logits: Logits, n_best: int, max_tokens: int) -> list[Span]:
    """Return the best spans of a window that begin where no other window has more context, in any order."""
    inside = slice(window.second_starts, window.second_starts + len(window.starts))
    of_start, of_end = logits[inside].astype(np.float64).T
    length = min(max_tokens, len(of_end))
    padded = np.concatenate([of_end, np.full(length - 1, -np.inf)])
    first = np.flatnonzero(window.has_max_context)
    # Row i, column j: the span of j + 1 tokens that begins with token first[i].
    scores = of_start[first, None] + np.lib.stride_tricks.sliding_window_view(padded, length)[first]
    flat = scores.ravel()
    chosen = np.argpartition(-flat, n_best)[:n_best] if len(flat) > n_best else np.arange(len(flat))
    chosen = chosen[flat[chosen] > -np.inf]  # not beyond the end of the window
    starts, ends = first[chosen // length], first[chosen // length] + chosen % length
    return [
        Span(context[window.starts[i] : window.ends[j]], float(of_start[i]), float(of_end[j]))
        for i, j in zip(starts, ends, strict=True)
    ]


def best_threshold(
    null_odds: NDArray[np.float64], answered: NDArray[np.float64], abstained: NDArray[np.float64]
) -> float:
    """Return the threshold on `null_odds`, above which no answer is given, with the best mean score.

    Of equal thresholds the lowest. This is `find_best_thresh` of the official evaluate-v2.0.py, exact also for equal
    odds.

    Args:
        null_odds: float64 (N,), finite.
        answered: float64 (N,), the score of each question if the best span is given.
        abstained: float64 (N,), its score if no answer is given.
    """
    by_odds = np.argsort(null_odds, kind="stable")
    odds = null_odds[by_odds]
    gains = np.concatenate([[0.0], np.cumsum((answered - abstained)[by_odds])])
    # Questions of equal odds are on the same side: a cut is possible only where the odds change.
    possible = np.concatenate([[True], odds[1:] != odds[:-1], [True]])
    count = int(np.where(possible, gains, -np.inf).argmax())
    return float(odds[count - 1]) if count else float(np.nextafter(odds[0], -np.inf))


def predicted_texts(answers: Sequence[Answer], threshold: float | None) -> list[str]:
    """Return the text of each answer, empty where `null_odds` exceeds `threshold`; None: every question has an
    answer."""
    return [
        "" if threshold is not None and answer.null_odds > threshold else answer.spans[0].text for answer in answers
    ]
