"""Fine-tuning on labeled examples: classification, regression, tagging and choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from multihop.eval.config import TrialSettings
from multihop.eval.finetune.heads import TaskModel
from multihop.eval.finetune.inputs import Encoded, batches_of_tokens
from multihop.eval.finetune.loop import History, finetune
from multihop.eval.metrics.score import NO_LABEL, score
from multihop.eval.tasks.task import Task
from multihop.pretrain.engine.inputs import to_device

_PREDICT_TOKENS = 8192


@dataclass(frozen=True)
class Predicted:
    """The predictions of a model for some examples."""

    answers: list[NDArray[np.float64]]
    """One array for each example: [class index], [score], or each word's label index."""
    probabilities: list[NDArray[np.float64]]
    """(classes,) for each example: the probability of each class or choice; empty arrays for other kinds of task."""


@dataclass(frozen=True)
class FineTuned:
    """The result of a fine-tuning."""

    value: float
    """The task's metric on the test examples, with the weights of the best epoch."""
    other_metrics: dict[str, float]
    """Further metrics of the test examples, and those of the task's other sets."""
    history: History
    predicted: Predicted
    """The predictions for the test examples."""
    unlabeled: dict[str, Predicted]


class Member(NamedTuple):
    """A model that is trained on a task."""

    model: TaskModel
    sets: Mapping[str, Encoded]
    """train, dev and test, and the task's other sets and those without labels by their names, as the model reads
    them."""
    seed: int
    """Decides the order of the examples, and dropout."""


def finetune_labeled(
    member: Member, task: Task, settings: TrialSettings, average_with: Sequence[Member] = ()
) -> FineTuned:
    """Train a model, then score the test examples and the task's other sets, and predict those without labels.

    Args:
        average_with: further models, which are trained in the same way; the probabilities of all are averaged. The
            curves and the best epoch of the result are those of `member`, but the development score is that of the
            average.

    Raises:
        NonFiniteLossError: the loss of a step was infinite or NaN.
    """
    members, sets = [member, *average_with], member.sets
    scale = TargetScale.of(sets["train"])
    history, *_ = [_train(each, task, settings, scale) for each in members]

    def predict_set(name: str) -> Predicted:
        return average([predict(each.model, task, each.sets[name], scale) for each in members])

    if average_with:
        history = replace(history, dev_value=score_of(task, sets["dev"], predict_set("dev"))[0])
    predicted = predict_set("test")
    value, other_metrics = score_of(task, sets["test"], predicted)
    for name in task.other_sets:
        other_value, more = score_of(task, sets[name], predict_set(name))
        other_metrics |= {f"{name} {metric}": number for metric, number in {task.metric: other_value, **more}.items()}
    return FineTuned(value, other_metrics, history, predicted, {name: predict_set(name) for name in task.unlabeled})


def _train(member: Member, task: Task, settings: TrialSettings, scale: "TargetScale") -> History:
    model, sets, seed = member
    train, dev = sets["train"], sets["dev"]
    return finetune(
        model,
        train.lengths,
        lambda batch: loss_of(model, train, batch, scale),
        lambda: score_of(task, dev, predict(model, task, dev, scale))[0],
        settings,
        seed,
        model.layer_groups(),
    )


def average(predicted: Sequence[Predicted]) -> Predicted:
    """Return the class or choice that is likeliest by the mean of several models' probabilities; the predictions of one
    model as they are."""
    if len(predicted) == 1:
        return predicted[0]
    probabilities = [np.mean(rows, axis=0) for rows in zip(*(each.probabilities for each in predicted), strict=True)]
    return Predicted([np.array([float(row.argmax())]) for row in probabilities], probabilities)


@dataclass(frozen=True)
class TargetScale:
    """Standardizes regression targets, so that one learning rate suits any scale of ratings."""

    mean: float
    std: float

    @staticmethod
    def of(train: Encoded) -> "TargetScale":
        """Return the scale of the training examples."""
        return TargetScale(float(train.targets.mean()), float(train.targets.std()) or 1.0)


def loss_of(model: TaskModel, examples: Encoded, batch: NDArray[np.int64], scale: TargetScale) -> Tensor:
    """Return the mean over the predictions: cross-entropy in nats, of labels of words with a CRF the whole sentence's,
    or the squared error of the standardized targets."""
    device = next(model.parameters()).device
    inputs = to_device(examples.collate(batch), device)
    outputs = model(**inputs)
    if not len(outputs):  # all words of these sentences were cut off
        return outputs.sum()
    labels = torch.from_numpy(examples.labels_of(batch)).to(device)
    if model.crf is not None:
        return model.crf.loss(outputs, _cu_words(inputs), labels.long())
    if model.kind == "regression":
        return F.mse_loss(outputs.squeeze(-1), ((labels - scale.mean) / scale.std).float())
    return F.cross_entropy(outputs, labels.long())


@torch.inference_mode()
def predict(model: TaskModel, task: Task, examples: Encoded, scale: TargetScale) -> Predicted:
    """Return the predictions for all examples. A word that was cut off gets "O", or `NO_LABEL` in a task without
    "O"."""
    device = next(model.parameters()).device
    model.eval()
    unread = task.labels.index("O") if "O" in task.labels else NO_LABEL
    answers: list[NDArray[np.float64]] = [np.empty(0)] * len(examples)
    probabilities = [np.empty(0)] * len(examples)
    for batch in batches_of_tokens(examples.lengths, _PREDICT_TOKENS):
        inputs = to_device(examples.collate(batch), device)
        outputs = model(**inputs).double()
        if model.kind == "tagging":
            tags = outputs.argmax(-1) if model.crf is None else model.crf.decode(outputs, _cu_words(inputs))
            labels, at = tags.cpu().numpy(), 0
            for i in batch:
                first, last = examples.cu_examples[i], examples.cu_examples[i + 1]
                kept = int(examples.cu_words[last] - examples.cu_words[first])
                answers[i] = np.full(examples.cu_targets[i + 1] - examples.cu_targets[i], float(unread))
                answers[i][:kept] = labels[at : at + kept]
                at += kept
        elif model.kind == "regression":
            for i, number in zip(batch, outputs.squeeze(-1).cpu().numpy() * scale.std + scale.mean, strict=True):
                answers[i] = np.array([number])
        else:
            for i, row in zip(batch, outputs.softmax(-1).cpu().numpy(), strict=True):
                answers[i], probabilities[i] = np.array([float(row.argmax())]), row
    return Predicted(answers, probabilities)


def _cu_words(inputs: Mapping[str, Any]) -> Tensor:
    """Return int64 (S + 1,): cumulative numbers of labeled words of the sequences."""
    return torch.searchsorted(inputs["words"], inputs["packed"].cu_seqlens)


def score_of(task: Task, examples: Encoded, predicted: Predicted) -> tuple[float, dict[str, float]]:
    """Return the task's metric, and other metrics, of some examples."""
    return score(task, predicted.answers, [examples.targets_of(i) for i in range(len(examples))])
