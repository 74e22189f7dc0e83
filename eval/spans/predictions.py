"""The files of predictions that SQuAD's official scripts and leaderboards read."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from multihop.eval.spans.answers import Answer, predicted_texts
from multihop.eval.tasks.task import Example

PREDICTIONS = "predictions.json"
N_BEST = "nbest_predictions.json"
NULL_ODDS = "null_odds.json"


def official_files(examples: Sequence[Example], answers: Sequence[Answer], threshold: float | None) -> dict[str, str]:
    """The content of each file that the `run_squad.py` of Devlin et al. 2018 writes, by its name.

    predictions.json has the text by question id; nbest_predictions.json a list of text, probability and logits by
    question id, the best first. With a threshold, as for SQuAD 2.0, the n-best includes no answer, and null_odds.json
    has the odds by question id that evaluate-v2.0.py takes as `--na-prob-file` (with the threshold as
    `--na-prob-thresh`).

    Args:
        threshold: on the null odds; None: every question has an answer.
    """
    ids = [example.id for example in examples]
    assert len(set(ids)) == len(ids)
    files: dict[str, dict[str, Any]] = {
        PREDICTIONS: dict(zip(ids, predicted_texts(answers, threshold), strict=True)),
        N_BEST: {i: n_best(answer, threshold is not None) for i, answer in zip(ids, answers, strict=True)},
    }
    if threshold is not None:
        files[NULL_ODDS] = {i: answer.null_odds for i, answer in zip(ids, answers, strict=True)}
    return {
        name: json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
        for name, content in files.items()
    }


def n_best(answer: Answer, with_null: bool) -> list[dict[str, str | float]]:
    """The spans with their probabilities, a softmax over the scores of the list, the best first."""
    spans = sorted([*answer.spans, *[answer.null] * with_null], key=lambda span: -span.score)
    scores = np.array([span.score for span in spans])
    weights = np.exp(scores - scores.max())
    return [
        {
            "text": span.text,
            "probability": float(probability),
            "start_logit": span.start_logit,
            "end_logit": span.end_logit,
        }
        for span, probability in zip(spans, weights / weights.sum(), strict=True)
    ]
