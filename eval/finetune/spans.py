"""Fine-tuning on answer spans (Devlin et al. 2018, sections 4.2 and 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multihop.eval.config import TrialSettings
from multihop.eval.finetune.heads import TaskModel
from multihop.eval.finetune.inputs import Encoded, batches_of_tokens
from multihop.eval.finetune.loop import History, finetune
from multihop.eval.finetune.official_files import official_files
from multihop.eval.finetune.span_answers import Answer, answer_questions, best_threshold, predicted_texts
from multihop.eval.finetune.span_inputs import Questions, SpanInputs
from multihop.eval.metrics.squad import Scores, accepted_texts, score_texts
from multihop.eval.tasks.squad import Name
from multihop.eval.tasks.task import Example
from multihop.pretrain.engine.inputs import to_device

_PREDICT_TOKENS = 16_384
_ERRORS = 20


@dataclass(frozen=True)
class FineTunedSpans:
    """The result of a fine-tuning on answer spans."""

    value: float
    """F1 on the reported questions, from 0 to 1."""
    other_metrics: dict[str, float]
    history: History
    predictions: dict[str, Any]
    """The content of `predictions_of` in `multihop.eval.trials.write_predictions`: targets are the accepted
    texts, predicted is the chosen one."""


def finetune_spans(model: TaskModel, inputs: SpanInputs, settings: TrialSettings, seed: int) -> FineTunedSpans:
    """Train `model` on all windows of the training questions, then answer the reported questions.

    Where some questions have no answer, the threshold for giving none is chosen on the development questions, after
    each epoch for its score, and for the reported questions with the weights of the best epoch.

    Raises:
        NonFiniteLossError: the loss of a step was infinite or NaN.
    """
    task, train, dev, test = inputs.task, inputs.train, inputs.dev, inputs.test

    def answers_of(questions: Questions) -> list[Answer]:
        return answer_questions(questions.examples, questions.windows, _logits(model, questions.encoded))

    def scored(questions: Questions, answers: list[Answer], threshold: float | None) -> Scores:
        return score_texts(cast(Name, task.name), questions.examples, predicted_texts(answers, threshold))

    def threshold_of(answers: list[Answer]) -> float | None:
        if all(example.targets for example in dev.examples):
            return None
        odds = np.array([answer.null_odds for answer in answers])
        none = score_texts(cast(Name, task.name), dev.examples, [""] * len(answers)).f1
        return best_threshold(odds, scored(dev, answers, None).f1, none)

    def dev_score() -> float:
        answers = answers_of(dev)
        return float(scored(dev, answers, threshold_of(answers)).f1.mean())

    history = finetune(
        model, train.lengths, lambda batch: _loss(model, train, batch), dev_score, settings, seed, model.layer_groups()
    )
    threshold = threshold_of(answers_of(dev))
    answers = answers_of(test)
    scores = scored(test, answers, threshold)
    others = scores.means()
    value = others.pop(task.metric)
    if threshold is not None:
        others["no-answer threshold"] = threshold
    texts = predicted_texts(answers, threshold)
    predictions = {
        "ids": [example.id for example in test.examples],
        "predicted": texts,
        "targets": [accepted_texts(example) for example in test.examples],
        "statistics": np.stack([scores.f1, np.ones_like(scores.f1)], 1).tolist(),
        "files": official_files(test.examples, answers, threshold),
        "errors": _worst(test.examples, texts, scores.f1),
    }
    return FineTunedSpans(value, others, history, predictions)


def span_loss(logits: Tensor, starts: Tensor, ends: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, in fp32, of the start and of the end among the tokens of their sequence.

    Devlin et al. 2018, section 4.2: S·T_i and E·T_i are the logits of token i; their softmax is over one sequence.

    Args:
        logits: float (N, 2), of the start and of the end, of the N tokens of S packed sequences.
        starts, ends: int64 (S,), the right positions, counted from the beginning of each sequence.
        cu_seqlens: int64 (S + 1,), cumulative sequence lengths, from 0 to N.
    """
    logits = logits.float()
    begins, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    sequence = torch.repeat_interleave(lengths, output_size=len(logits))
    # The largest logit is subtracted for range alone: it needs no gradient.
    largest = logits.new_full((len(lengths), 2), -torch.inf)
    largest = largest.scatter_reduce(0, sequence[:, None].expand(-1, 2), logits.detach(), "amax")
    sums = torch.zeros_like(largest).index_add(0, sequence, (logits - largest[sequence]).exp())
    chosen = torch.stack([logits[begins + starts, 0], logits[begins + ends, 1]], dim=1)
    return (largest + sums.log() - chosen).mean()


def _loss(model: TaskModel, examples: Encoded, batch: NDArray[np.int64]) -> Tensor:
    device = next(model.parameters()).device
    inputs = to_device(examples.collate(batch), device)
    positions = torch.from_numpy(examples.labels_of(batch)).to(device, torch.int64)
    return span_loss(model(**inputs), positions[::2], positions[1::2], inputs["packed"].cu_seqlens)


@torch.inference_mode()
def _logits(model: TaskModel, examples: Encoded) -> list[NDArray[np.float32]]:
    """Return the logits, (T, 2) for each window."""
    device = next(model.parameters()).device
    model.eval()
    logits: list[NDArray[np.float32]] = [np.empty((0, 2), np.float32)] * len(examples)
    lengths = examples.lengths
    for batch in batches_of_tokens(lengths, _PREDICT_TOKENS):
        outputs = model(**to_device(examples.collate(batch), device)).float().cpu().numpy()
        for i, part in zip(batch, np.split(outputs, np.cumsum(lengths[batch])[:-1]), strict=True):
            logits[i] = part
    return logits


def _worst(examples: Sequence[Example], texts: Sequence[str], f1: NDArray[np.float64]) -> list[dict[str, Any]]:
    worst = [int(i) for i in np.argsort(f1, kind="stable")[:_ERRORS] if f1[i] < 1]
    return [
        {
            "text": f"{examples[i].texts[0]} | {examples[i].texts[1]}",
            "target": " or ".join(dict.fromkeys(accepted_texts(examples[i]))) or "no answer",
            "predicted": texts[i] or "no answer",
            "probability": None,
        }
        for i in worst
    ]
