"""Fine-tuning one model on one task.

for each epoch:
    for each batch of examples of similar length:
        step on its mean loss
    score the development examples; remember the weights when no epoch before was better
score the test examples with the remembered weights
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from eval.config import EvalConfig
from eval.encode import Encoded, batches
from eval.heads import TaskModel, collate
from eval.metrics import score
from eval.tasks import Task
from pretrain.keyed import key_of
from pretrain.models import decays

_WARMUP = 0.1
_WEIGHT_DECAY = 0.01
_CLIP_NORM = 1.0
_PREDICT_BATCH = 64


class NonFiniteLossError(Exception):
    """The loss became infinite or NaN: there is no result with these settings."""


@dataclass(frozen=True)
class FineTuned:
    """What came out."""

    value: float
    """The task's metric on the test examples, with the weights of the best epoch."""
    dev_value: float
    """The metric on the development examples in the best epoch."""
    best_epoch: float
    other_metrics: dict[str, float]
    """Of the test examples."""


def finetune(
    model: TaskModel,
    task: Task,
    train: Sequence[Encoded],
    dev: Sequence[Encoded],
    test: Sequence[Encoded],
    config: EvalConfig,
    seed: int,
) -> FineTuned:
    """Train `model` with AdamW, warm-up and linear decay, as Devlin et al. 2018, A.3; changes `model`.

    The order of the batches and the dropout depend on `seed` alone. The best epoch is chosen by the development
    score, the earlier one of equals.

    Raises:
        NonFiniteLossError: the loss of a step was infinite or NaN.
    """
    device = next(model.parameters()).device
    lengths = np.array([len(example.ids) for example in train], np.int64)
    steps_an_epoch = math.ceil(len(train) / config.batch_size)
    steps = max(1, round(config.epochs * steps_an_epoch))
    scale = TargetScale.of(train)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=config.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    torch.manual_seed(key_of("fine-tuning dropout", seed) >> 1)

    step, best_value, best_epoch = 0, -math.inf, 0.0
    best: dict[str, Tensor] = {}
    for epoch in range(math.ceil(steps / steps_an_epoch)):
        model.train()
        for batch in batches(lengths, config.batch_size, seed, epoch):
            if step == steps:
                break
            examples = [train[i] for i in batch]
            loss = loss_of(model, examples, scale, device)
            if not torch.isfinite(loss):
                raise NonFiniteLossError(f"the loss became {loss.item()} in step {step + 1} of {steps}; lower eval.lr")
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), _CLIP_NORM)
            optimizer.step()
            schedule.step()
            step += 1
        dev_value = score_of(model, task, dev, scale)[0]
        if dev_value > best_value:
            best_value, best_epoch = dev_value, step / steps_an_epoch
            best = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    model.load_state_dict(best)
    value, other_metrics = score_of(model, task, test, scale)
    return FineTuned(value, best_value, best_epoch, other_metrics)


def rate(step: int, steps: int) -> float:
    """Factor on the learning rate in a step counted from 0: up over the first tenth, then linearly down to 0."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / (steps - warmup + 1))


def parameter_groups(model: TaskModel) -> list[dict[str, object]]:
    """Matrices decay, biases and layer norms do not."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if decays(name) == wanted], "weight_decay": wanted * _WEIGHT_DECAY}
        for wanted in (True, False)
    ]


@dataclass(frozen=True)
class TargetScale:
    """Scores are learnt in units of their deviation, so that one learning rate suits any scale of ratings."""

    mean: float
    std: float

    @staticmethod
    def of(train: Sequence[Encoded]) -> "TargetScale":
        """From the training examples alone."""
        targets = np.concatenate([example.targets for example in train])
        return TargetScale(float(targets.mean()), float(targets.std()) or 1.0)


def loss_of(model: TaskModel, examples: Sequence[Encoded], scale: TargetScale, device: torch.device) -> Tensor:
    """Mean over the questions asked: cross-entropy in nats, or the squared error in units of the deviation."""
    outputs = model(**collate(examples, device))
    if model.kind == "regression":
        wanted = (np.concatenate([example.targets for example in examples]) - scale.mean) / scale.std
        return F.mse_loss(outputs.squeeze(-1), torch.from_numpy(wanted).to(device, torch.float32))
    asked = [e.targets[: len(e.asked_at)] if model.kind == "tagging" else e.targets for e in examples]
    return F.cross_entropy(outputs, torch.from_numpy(np.concatenate(asked)).to(device, torch.int64))


@torch.no_grad()
def predict(model: TaskModel, examples: Sequence[Encoded], scale: TargetScale) -> list[NDArray[np.float64]]:
    """One array an example, as long as its targets. A word that was cut off is predicted to be outside any name."""
    device = next(model.parameters()).device
    model.eval()
    predicted: list[NDArray[np.float64]] = [np.empty(0)] * len(examples)
    by_length = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))
    for start in range(0, len(by_length), _PREDICT_BATCH):
        batch = by_length[start : start + _PREDICT_BATCH]
        outputs = model(**collate([examples[i] for i in batch], device))
        if model.kind == "regression":
            answers = outputs.squeeze(-1).double().cpu().numpy() * scale.std + scale.mean
        else:
            answers = outputs.argmax(-1).double().cpu().numpy()
        at = 0
        for i in batch:
            asked = len(examples[i].asked_at) if model.kind == "tagging" else 1
            predicted[i] = np.zeros(len(examples[i].targets))
            predicted[i][:asked] = answers[at : at + asked]
            at += asked
    return predicted


def score_of(
    model: TaskModel, task: Task, examples: Sequence[Encoded], scale: TargetScale
) -> tuple[float, dict[str, float]]:
    """The task's metric on some examples, and other metrics of the same predictions."""
    return score(task, predict(model, examples, scale), [example.targets for example in examples])
