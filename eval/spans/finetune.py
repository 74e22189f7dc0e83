"""Fine-tuning on answer spans (Devlin et al. 2018, sections 4.2 and 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.tokenizers.tokenizer import Tokenizer
from eval.config import TrialSettings
from eval.finetune import History, finetune
from eval.frames import Frame
from eval.heads import TaskModel
from eval.inputs import Encoded, batches_of_tokens
from eval.spans.answers import Answer, answer_questions, best_threshold, predicted_texts
from eval.spans.loss import span_loss
from eval.spans.predictions import official_files
from eval.spans.squad_metrics import Scores, accepted_texts, score_texts
from eval.spans.windows import Window, windows
from eval.tasks.squad import Name
from eval.tasks.task import Example, Task
from pretrain.engine.inputs import on_device

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
    """As `eval.predictions.predictions_of` returns them: targets are the accepted texts, predicted the given one."""


def finetune_spans(
    model: TaskModel,
    task: Task,
    sets: dict[str, list[Example]],
    tokenizer: Tokenizer,
    frame: Frame,
    causal: bool,
    settings: TrialSettings,
    seed: int,
) -> FineTunedSpans:
    """Train `model` on all windows of the training questions, then answer the questions of sets["test"].

    Where some questions have no answer, the threshold for giving none is chosen on sets["dev"], after each epoch for
    its score, and for the reported questions with the weights of the best epoch.

    Args:
        sets: train, dev and test.
        causal: whether a token sees only those before it: no answer is then at the last token.

    Raises:
        NonFiniteLossError: the loss of a step was infinite or NaN.
        ValueError: `settings.seq_len` leaves no room for context.
    """
    framed = ([*frame.before], [*frame.between], [*frame.after])
    cut = {
        name: windows(examples, tokenizer, framed, causal, settings.seq_len, settings.stride)
        for name, examples in sets.items()
    }
    train = _encoded(cut["train"])

    def answers_of(name: str) -> list[Answer]:
        return answer_questions(sets[name], cut[name], _logits(model, _encoded(cut[name])))

    def scored(name: str, answers: list[Answer], threshold: float | None) -> Scores:
        return score_texts(cast(Name, task.name), sets[name], predicted_texts(answers, threshold))

    def threshold_of(answers: list[Answer]) -> float | None:
        if all(example.targets for example in sets["dev"]):
            return None
        odds = np.array([answer.null_odds for answer in answers])
        none = score_texts(cast(Name, task.name), sets["dev"], [""] * len(answers)).f1
        return best_threshold(odds, scored("dev", answers, None).f1, none)

    def dev_score() -> float:
        answers = answers_of("dev")
        return float(scored("dev", answers, threshold_of(answers)).f1.mean())

    history = finetune(model, train.lengths, lambda batch: _loss(model, train, batch), dev_score, settings, seed)
    threshold = threshold_of(answers_of("dev"))
    answers = answers_of("test")
    found = scored("test", answers, threshold)
    others = found.means()
    value = others.pop(task.metric)
    if threshold is not None:
        others["no-answer threshold"] = threshold
    texts = predicted_texts(answers, threshold)
    predictions = {
        "ids": [example.id for example in sets["test"]],
        "predicted": texts,
        "targets": [accepted_texts(example) for example in sets["test"]],
        "statistics": np.stack([found.f1, np.ones_like(found.f1)], 1).tolist(),
        "files": official_files(sets["test"], answers, threshold),
        "errors": _worst(sets["test"], texts, found.f1),
    }
    return FineTunedSpans(value, others, history, predictions)


def _encoded(cut: Sequence[Window]) -> Encoded:
    """Each window as an example, whose targets are the positions of the answer's first and last token."""
    nothing = np.zeros(len(cut) + 1, np.int64)
    return Encoded(
        ids=np.concatenate([window.ids for window in cut]).astype(np.int32),
        cu_seqlens=np.cumsum([0, *(len(window.ids) for window in cut)]),
        second_starts=np.array([window.second_starts for window in cut], np.int32),
        cu_examples=np.arange(len(cut) + 1),
        words=np.empty(0, np.int32),
        cu_words=nothing,
        targets=np.array([position for window in cut for position in (window.start, window.end)], np.float64),
        cu_targets=2 * np.arange(len(cut) + 1),
    )


def _loss(model: TaskModel, examples: Encoded, batch: NDArray[np.int64]) -> Tensor:
    device = next(model.parameters()).device
    inputs = on_device(examples.collate(batch), device)
    positions = torch.from_numpy(examples.labels_of(batch)).to(device, torch.int64)
    return span_loss(model(**inputs), positions[::2], positions[1::2], inputs["cu_seqlens"])


@torch.inference_mode()
def _logits(model: TaskModel, examples: Encoded) -> list[NDArray[np.float32]]:
    """(T, 2) for each window."""
    device = next(model.parameters()).device
    model.eval()
    found: list[NDArray[np.float32]] = [np.empty((0, 2), np.float32)] * len(examples)
    lengths = examples.lengths
    for batch in batches_of_tokens(lengths, _PREDICT_TOKENS):
        outputs = model(**on_device(examples.collate(batch), device)).float().cpu().numpy()
        for i, part in zip(batch, np.split(outputs, np.cumsum(lengths[batch])[:-1]), strict=True):
            found[i] = part
    return found


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
