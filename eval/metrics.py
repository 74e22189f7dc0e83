"""The metrics, by their official definitions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eval.tasks import Task

Predictions = Sequence[NDArray[np.float64]]
"""One array an example: [class index], [score], or each word's label index."""


def score(task: Task, predicted: Predictions, targets: Predictions) -> tuple[float, dict[str, float]]:
    """The task's metric, and other metrics of the same predictions by name."""
    assert len(predicted) == len(targets) > 0
    if task.kind == "tagging":
        names = [[task.labels[int(label)] for label in line] for line in predicted]
        gold = [[task.labels[int(label)] for label in line] for line in targets]
        return entity_scores(names, gold)
    flat, wanted = np.concatenate(predicted), np.concatenate(targets)
    if task.kind == "classification":
        return accuracy(flat, wanted), {"largest class": float(np.bincount(wanted.astype(int)).max() / len(wanted))}
    return pearson(flat, wanted), {"Spearman": spearman(flat, wanted)}


def accuracy(predicted: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
    """Share of examples whose class is right."""
    return float((predicted == targets).mean())


def entity_scores(predicted: list[list[str]], targets: list[list[str]]) -> tuple[float, dict[str, float]]:
    """F1 over whole entities, with precision and recall: CoNLL's `conlleval`, as seqeval computes it.

    An entity counts as found when its first word, last word and type are all right. Where nothing is predicted or
    nothing is to be found, the measure is 0, as in `conlleval`.
    """
    from seqeval.metrics import f1_score, precision_score, recall_score

    f1, precision, recall = (
        float(measure(targets, predicted, zero_division=0)) for measure in (f1_score, precision_score, recall_score)
    )
    return f1, {"precision": precision, "recall": recall}


def pearson(predicted: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
    """Pearson's r; 0 where all predictions are the same, which says nothing about the targets (r is undefined)."""
    if len(predicted) < 2 or np.ptp(predicted) == 0 or np.ptp(targets) == 0:
        return 0.0
    return float(np.corrcoef(predicted, targets)[0, 1])


def spearman(predicted: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
    """Spearman's rho: Pearson's r of the ranks, equal values sharing the mean of their ranks."""
    from scipy.stats import rankdata

    return pearson(rankdata(predicted), rankdata(targets))
