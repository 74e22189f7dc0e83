"""Task metrics, by their official definitions, and the per-example sums from which each can be computed again.

A metric of resampled examples, as the bootstrap needs it thousands of times, is a function of sums over examples:
`from_sums(metric, statistics(metric, task, predicted, targets).sum(0))` is what the official library gives.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from multihop.eval.metrics.bleu import bleu_of_sums
from multihop.eval.tasks.task import Task

Predictions = Sequence[NDArray[np.float64]]
"""One array for each example: [class index], [score], or each word's label index. For "SQuAD F1" and "exact match" the
predictions are [the metric of the example, 0 to 1]; for "perplexity" they are [negative log-likelihood in nats] and the
targets [tokens]."""
Float = NDArray[np.float64]

NO_LABEL = -1
"""The prediction for a word that was cut off, in tasks without the label "O": wrong whatever the target is."""
_NEARLY_CONSTANT = 1e-12
"""Variance over second moment at which all values are equal but for rounding."""
_MEANS = ("SQuAD F1", "exact match")


def score(task: Task, predicted: Predictions, targets: Predictions) -> tuple[float, dict[str, float]]:
    """Return the task's metric, and by name its other metrics and further figures of the same predictions."""
    assert len(predicted) == len(targets) > 0
    others = {name: _score(name, task, predicted, targets) for name in task.other_metrics}
    if task.metric == "entity F1":
        value, parts = entity_scores(_names(task, predicted), _names(task, targets))
        return value, {**parts, **others}
    if task.kind == "classification":
        others["largest class"] = float(np.bincount(np.concatenate(targets).astype(int)).max() / len(targets))
    if task.metric == "Pearson":
        others["Spearman"] = _score("Spearman", task, predicted, targets)
    return _score(task.metric, task, predicted, targets), others


def _score(metric: str, task: Task, predicted: Predictions, targets: Predictions) -> float:
    flat, wanted = np.concatenate(predicted), np.concatenate(targets)
    match metric:
        case "accuracy":
            return accuracy(flat, wanted)
        case "F1" | "macro F1":
            from sklearn.metrics import f1_score

            average = "binary" if metric == "F1" else "macro"
            return float(f1_score(wanted.astype(int), flat.astype(int), average=average, zero_division=0))
        case "Matthews":
            from sklearn.metrics import matthews_corrcoef

            if len(np.union1d(flat, wanted)) < 2:  # scikit-learn warns about it
                return 0.0
            return float(matthews_corrcoef(wanted.astype(int), flat.astype(int)))
        case "Pearson":
            return pearson(flat, wanted)
        case "Spearman":
            return spearman(flat, wanted)
        case "entity F1":
            return entity_scores(_names(task, predicted), _names(task, targets))[0]
    return float(from_sums(metric, statistics(metric, task, predicted, targets).sum(0)))


def accuracy(predicted: Float, targets: Float) -> float:
    """Return the fraction of the predictions (of examples, or of words) that are right."""
    return float((predicted == targets).mean())


def entity_scores(predicted: list[list[str]], targets: list[list[str]]) -> tuple[float, dict[str, float]]:
    """Return entity-level F1, precision and recall as CoNLL's `conlleval` defines them, computed by seqeval.

    An entity is correct if its first word, last word and type all match. Undefined values are 0, as in `conlleval`:
    precision without predicted entities, recall without true ones.
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    precision, recall, f1, _ = map(
        float, precision_recall_fscore_support(targets, predicted, average="micro", zero_division=0)
    )
    return f1, {"precision": precision, "recall": recall}


def pearson(predicted: Float, targets: Float) -> float:
    """Return Pearson's r; 0 if it is undefined because all predictions or all targets are equal."""
    from scipy.stats import pearsonr

    if len(predicted) < 2 or np.ptp(predicted) == 0 or np.ptp(targets) == 0:
        return 0.0
    return float(pearsonr(predicted, targets).statistic)


def spearman(predicted: Float, targets: Float) -> float:
    """Return Spearman's rho: Pearson's r of the ranks, where ties get their mean rank."""
    from scipy.stats import rankdata

    return pearson(rankdata(predicted), rankdata(targets))


def statistics(metric: str, task: Task, predicted: Predictions, targets: Predictions) -> Float:
    """Return the summands of each example in the sums that determine a metric.

    Returns:
        float64 (N, k). accuracy: right predictions, predictions. F1 and Matthews (class 1 of two is the positive one):
        true and false positives, false and true negatives. macro F1: true positives, false positives and false
        negatives of each class in turn. entity F1: right, predicted and true entities. Pearson and Spearman: 1, x, y,
        xx, yy, xy of the standardized predictions x and targets y, or of their ranks among all examples. perplexity:
        nats, tokens. SQuAD F1 and exact match: the value, 1.
    """
    assert len(predicted) == len(targets) > 0
    if metric == "accuracy":
        pairs = zip(predicted, targets, strict=True)
        return np.array([[(line == gold).sum(), len(gold)] for line, gold in pairs], np.float64)
    if metric == "entity F1":
        return _entity_counts(_names(task, predicted), _names(task, targets))
    x, y = np.concatenate(predicted), np.concatenate(targets)
    match metric:
        case "F1" | "Matthews":
            assert len(task.labels) == 2
            return np.stack([x * y, x * (1 - y), (1 - x) * y, (1 - x) * (1 - y)], -1)
        case "macro F1":
            classes = np.arange(len(task.labels))
            p, t = x[:, None] == classes, y[:, None] == classes
            return np.stack([p & t, p & ~t, ~p & t], -1).reshape(len(x), -1).astype(np.float64)
        case "Pearson":
            return _moments(x, y)
        case "Spearman":
            from scipy.stats import rankdata

            return _moments(rankdata(x), rankdata(y))
        case "perplexity":
            return np.stack([x, y], -1)
    assert metric in _MEANS, metric
    return np.stack([x, np.ones_like(x)], -1)


def from_sums(metric: str, sums: Float) -> Float:
    """Return a metric of many (re)samples of examples from the sums of their `statistics`.

    Args:
        sums: float64 (..., k).

    Returns:
        float64 (...). F1, Matthews and correlations are 0 where they are undefined, as in scikit-learn and conlleval.
    """
    part = np.moveaxis(sums, -1, 0)
    match metric:
        case "F1":
            return _ratio(2 * part[0], 2 * part[0] + part[1] + part[2])
        case "macro F1":
            # Over the classes that occur among the predictions or the targets, as in scikit-learn.
            tp, fp, fn = np.moveaxis(sums.reshape(*sums.shape[:-1], -1, 3), -1, 0)
            return _ratio(_ratio(2 * tp, 2 * tp + fp + fn).sum(-1), (tp + fp + fn > 0).sum(-1))
        case "Matthews":
            tp, fp, fn, tn = part
            return _ratio(tp * tn - fp * fn, np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
        case "entity F1":
            return _ratio(2 * part[0], part[1] + part[2])
        case "Pearson" | "Spearman":
            n, x, y, xx, yy, xy = part
            varies = [n * square - one**2 > _NEARLY_CONSTANT * n * square for one, square in ((x, xx), (y, yy))]
            product = np.where(varies[0] & varies[1], (n * xx - x**2) * (n * yy - y**2), 0)
            return np.clip(_ratio(n * xy - x * y, np.sqrt(np.maximum(product, 0))), -1, 1)
        case "perplexity":
            return np.exp(_ratio(part[0], part[1]))
        case "BLEU":
            return bleu_of_sums(sums)
    assert metric == "accuracy" or metric in _MEANS, metric
    return _ratio(part[0], part[1])


def _ratio(numerator: Float, denominator: Float) -> Float:
    """Return the quotient; 0 where the denominator is 0."""
    zero = np.zeros(np.broadcast_shapes(np.shape(numerator), np.shape(denominator)))
    return np.divide(numerator, denominator, out=zero, where=np.asarray(denominator) != 0)


def _moments(x: Float, y: Float) -> Float:
    """Return moments of standardized values: sums of squares of values far from 0 would lose the digits that vary."""
    x, y = _standardized(x), _standardized(y)
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], -1)


def _standardized(values: Float) -> Float:
    if np.ptp(values) == 0:
        return np.zeros_like(values, np.float64)
    centered = values - values.mean()
    return centered / np.abs(centered).max()


def _entity_counts(predicted: list[list[str]], targets: list[list[str]]) -> Float:
    from seqeval.metrics.sequence_labeling import get_entities

    pairs = [(set(get_entities(line)), set(get_entities(gold))) for line, gold in zip(predicted, targets, strict=True)]
    return np.array([[len(predicted & true), len(predicted), len(true)] for predicted, true in pairs], np.float64)


def _names(task: Task, lines: Predictions) -> list[list[str]]:
    return [["O" if label == NO_LABEL else task.labels[int(label)] for label in line] for line in lines]
