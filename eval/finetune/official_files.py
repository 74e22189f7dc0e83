"""Writes the files of predictions that official scripts (SQuAD's) and leaderboards (GLUE's) read."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from multihop.common.errors import UserError
from multihop.eval.finetune.span_answers import Answer, predicted_texts
from multihop.eval.tasks.glue import NAMES, TASKS
from multihop.eval.tasks.task import Example

PREDICTIONS = "predictions.json"
N_BEST = "nbest_predictions.json"
NULL_ODDS = "null_odds.json"


def official_files(examples: Sequence[Example], answers: Sequence[Answer], threshold: float | None) -> dict[str, str]:
    """Return the content of each file that the `run_squad.py` of Devlin et al. 2018 writes, by its name.

    predictions.json has the text by question id; nbest_predictions.json a list of text, probability and logits by
    question id, the best first. With a threshold, as for SQuAD 2.0, the n-best includes no answer, and null_odds.json
    has the odds by question id that evaluate-v2.0.py takes as `--na-prob-file` (with the threshold as
    `--na-prob-thresh`).

    Args:
        threshold: threshold on the null odds; None: every question has an answer.
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
    """Return the spans with their probabilities, a softmax over the scores of the list, the best first."""
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


def predictions_file(task_name: str, ids: Sequence[str], predictions: ArrayLike) -> str:
    """Return the content of a file of predictions: a header, then each example's index and prediction.

    Classes are spelled as in the task's training file, scores of STS-B have three decimals and are clipped to 0..5.

    Args:
        ids: the examples' official indexes, in the file's order.
        predictions: float64 (N,) or (N, 1): the class's index in `Task.labels`, or the score.

    Raises:
        UserError: the task has no leaderboard.
    """
    if task_name not in TASKS:
        raise UserError(f"task {task_name} has no leaderboard's file of predictions; these have: {', '.join(NAMES)}")
    values = TASKS[task_name].values
    numbers = np.asarray(predictions, np.float64).reshape(-1)
    assert len(numbers) == len(ids) and all(ids) and np.isfinite(numbers).all()
    cells = [values[int(n)] for n in numbers] if values else [f"{n:.3f}" for n in np.clip(numbers, 0.0, 5.0)]
    lines = ["index\tprediction", *(f"{index}\t{cell}" for index, cell in zip(ids, cells, strict=True))]
    return "".join(f"{line}\n" for line in lines)
