"""Fine-tuning learns what can be learnt, does the same for the same seed, and keeps the best epoch."""

import math
from pathlib import Path

import pytest
import torch

from data_prep.shards import open_dataset
from data_prep.tokenizers.tokenizer import load
from eval.config import EvalConfig
from eval.encode import Encoded, encode
from eval.finetune import FineTuned, NonFiniteLossError, TargetScale, finetune, predict, rate, score_of
from eval.heads import TaskModel, collate
from eval.tasks import Task, load_task
from pretrain.config import ModelConfig
from pretrain.models import build_model, initialise

Parts = tuple[list[Encoded], list[Encoded], list[Encoded]]


def _encoded(task: Task, data: Path, seq_len: int = 64) -> Parts:
    info = open_dataset(data).manifest.tokenizer
    tokenizer = load(data / info.file)
    train, dev, test = (
        encode(part, task.kind, tokenizer, info.special_ids, seq_len) for part in (task.train, task.dev, task.test)
    )
    return train, dev, test


def _model(config: ModelConfig, data: Path, task: Task, seed: int) -> TaskModel:
    encoder = build_model(config, open_dataset(data).manifest.tokenizer.vocab_size)
    initialise(encoder, seed)
    return TaskModel(encoder, task, seed)


def _run(config: ModelConfig, data: Path, task: Task, settings: EvalConfig, seed: int) -> tuple[FineTuned, TaskModel]:
    model = _model(config, data, task, seed)
    return finetune(model, task, *_encoded(task, data), settings, seed), model


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.usefixtures("bbc", "one_thread")
def test_bert_learns_classes(bert: ModelConfig, bert_data: Path, quick: EvalConfig) -> None:
    result, _ = _run(bert, bert_data, load_task("bbc-topics", None), quick, 0)
    assert result.value > 0.8 > 2 * result.other_metrics["largest class"]
    assert result.dev_value > 0.8


@pytest.mark.usefixtures("bbc", "one_thread")
def test_gpt2_learns_classes_from_its_last_piece(gpt2: ModelConfig, gpt2_data: Path, quick: EvalConfig) -> None:
    result, _ = _run(gpt2, gpt2_data, load_task("bbc-topics", None), quick, 0)
    assert result.value > 0.8


@pytest.mark.usefixtures("conll", "one_thread")
def test_names_are_learnt(bert: ModelConfig, bert_data: Path, quick: EvalConfig) -> None:
    settings = quick.model_copy(update={"epochs": 12, "batch_size": 4})
    result, _ = _run(bert, bert_data, load_task("conll2003", None), settings, 0)
    assert result.value > 0.8
    assert set(result.other_metrics) == {"precision", "recall"}


@pytest.mark.usefixtures("one_thread")
def test_scores_are_learnt_on_their_own_scale(
    bert: ModelConfig, bert_data: Path, quick: EvalConfig, reviews: Path
) -> None:
    task = load_task("vader-reviews", str(reviews))
    result, model = _run(bert, bert_data, task, quick, 0)
    assert result.value > 0.6 and result.other_metrics["Spearman"] > 0.6
    train, _, test = _encoded(task, bert_data)
    predicted = [float(p[0]) for p in predict(model, test, TargetScale.of(train))]
    errors = [abs(p - float(e.targets[0])) for p, e in zip(predicted, test, strict=True)]
    assert sum(errors) / len(errors) < TargetScale.of(train).std


@pytest.mark.usefixtures("bbc", "one_thread")
def test_a_seed_decides_everything(bert: ModelConfig, bert_data: Path) -> None:
    settings = EvalConfig(epochs=1.5, lr=1e-3, seq_len=32)
    task = load_task("bbc-topics", None)
    first, model = _run(bert, bert_data, task, settings, 3)
    torch.manual_seed(999)  # whatever else drew random numbers before
    again, same = _run(bert, bert_data, task, settings, 3)
    assert first == again
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
    other = _run(bert, bert_data, task, settings, 4)[1]
    assert not torch.equal(model.head.weight, other.head.weight)


@pytest.mark.usefixtures("bbc", "one_thread")
def test_the_best_epochs_weights_are_those_that_are_scored(
    bert: ModelConfig, bert_data: Path, quick: EvalConfig
) -> None:
    task = load_task("bbc-topics", None)
    result, model = _run(bert, bert_data, task, quick, 1)
    train, dev, test = _encoded(task, bert_data)
    assert score_of(model, task, dev, TargetScale.of(train))[0] == result.dev_value
    assert score_of(model, task, test, TargetScale.of(train))[0] == result.value
    assert result.best_epoch in (1, 2, 3, 4)


@pytest.mark.usefixtures("bbc", "one_thread")
def test_a_loss_that_is_not_finite_is_an_error(bert: ModelConfig, bert_data: Path) -> None:
    task = load_task("bbc-topics", None)
    model = _model(bert, bert_data, task, 0)
    with torch.no_grad():
        model.head.weight.fill_(math.inf)
    with pytest.raises(NonFiniteLossError, match="in step 1 of"):
        finetune(model, task, *_encoded(task, bert_data), EvalConfig(epochs=1), 0)


@pytest.mark.usefixtures("conll", "one_thread")
def test_padding_changes_nothing_and_cut_words_are_outside(bert: ModelConfig, bert_data: Path) -> None:
    task = load_task("conll2003", None)
    model = _model(bert, bert_data, task, 0).eval()
    with torch.no_grad():
        model.head.bias[0] = -9.0  # never "outside", unless nothing was asked
    _, _, test = _encoded(task, bert_data, seq_len=12)
    together = predict(model, test, TargetScale(0, 1))
    for example, answers in zip(test, together, strict=True):
        [alone] = predict(model, [example], TargetScale(0, 1))
        assert alone.tolist() == answers.tolist() and len(answers) == len(example.targets)
        asked = len(example.asked_at)
        assert (answers[:asked] > 0).all() and (answers[asked:] == 0).all()
    assert any(len(e.asked_at) < len(e.targets) for e in test)
    device = torch.device("cpu")
    with torch.no_grad():
        assert torch.allclose(
            model(**collate(test[:1], device)), model(**collate(test[:9], device))[: len(test[0].asked_at)], atol=1e-5
        )


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 137])
def test_the_rate_climbs_for_a_tenth_and_falls_to_almost_nothing(steps: int) -> None:
    factors = [rate(step, steps) for step in range(steps)]
    peak = factors.index(max(factors))
    assert max(factors) == 1.0 and peak == max(1, round(steps / 10)) - 1
    assert factors[: peak + 1] == sorted(factors[: peak + 1]) and all(f > 0 for f in factors)
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert rate(steps, steps) == 0.0
