"""Writes the predictions behind a trial's score beside its row, for comparisons of examples and for readers."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from multihop.common.files import make_folder, write_atomically
from multihop.eval.finetune.input_cache import TaskInputs
from multihop.eval.finetune.inputs import Encoded
from multihop.eval.finetune.official_files import predictions_file
from multihop.eval.metrics.score import statistics
from multihop.eval.tasks.glue import TASKS
from multihop.eval.tasks.task import Task

if TYPE_CHECKING:
    from multihop.eval.finetune.labeled import FineTuned, Predicted

_ERRORS = 20


def predictions_of(
    task: Task, inputs: TaskInputs, result: "FineTuned", decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Return the predictions of the test examples and of those without labels, as plain JSON values.

    Returns:
        predicted, targets: a list for each test example; statistics: (N, k), see `metrics.score.statistics`;
        ids: the official ids of the test examples; files: the contents of the official files of predictions by their
        names; errors: the worst ones as text, with the probability of the prediction.
    """
    test = inputs.sets["test"]
    targets = [test.targets_of(i) for i in range(len(test))]
    return {
        "ids": inputs.ids["test"],
        "predicted": [each.tolist() for each in result.predicted.answers],
        "targets": [target.tolist() for target in targets],
        "statistics": statistics(task.metric, task, result.predicted.answers, targets).tolist(),
        "files": {
            name: predictions_file(task.name, inputs.ids[name], np.concatenate(predicted.answers))
            for name, predicted in result.unlabeled.items()
            if task.name in TASKS
        },
        "errors": _worst(task, test, result.predicted, decode),
    }


def write_predictions(folder: Path, key: str, content: dict[str, Any]) -> str:
    """Write KEY.json, and the official files into KEY/, below `folder`; returns the SHA-256 of KEY.json."""
    files = content.get("files", {})
    for name, text in files.items():
        make_folder(folder / key)
        write_atomically(folder / key / name, text.encode())
    make_folder(folder)
    rest = {name: value for name, value in content.items() if name != "files"}
    written = json.dumps(rest).encode()
    write_atomically(folder / f"{key}.json", written)
    return hashlib.sha256(written).hexdigest()


def _worst(
    task: Task, test: Encoded, predicted: "Predicted", decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """Return the examples with the least probability for the right answer, or with the largest difference."""
    if task.kind == "tagging":
        return []
    answers = np.array([each[0] for each in predicted.answers])
    targets = np.array([test.targets_of(i)[0] for i in range(len(test))])
    if task.kind == "regression":
        badness = np.abs(answers - targets)
    else:
        right = [row[int(target)] for row, target in zip(predicted.probabilities, targets, strict=True)]
        badness = np.where(answers == targets, -1.0, 1 - np.array(right))
    worst = np.argsort(-badness, kind="stable")[:_ERRORS]

    def name(answer: float) -> Any:
        return task.labels[int(answer)] if task.kind == "classification" else answer

    return [
        {
            "text": decode(test.ids[test.cu_seqlens[first] : test.cu_seqlens[first + 1]].tolist()),
            "target": name(targets[i]),
            "predicted": name(answers[i]),
            "probability": float(predicted.probabilities[i].max()) if task.kind != "regression" else None,
        }
        for i in worst
        if badness[i] > 0
        for first in [test.cu_examples[i]]
    ]
