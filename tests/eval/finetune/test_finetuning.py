"""Fine-tuning learns what can be learned, is the same for the same seed, and keeps the best epoch."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.tokenizer import load
from multihop.eval.config import TrialSettings
from multihop.eval.finetune.heads import TaskModel
from multihop.eval.finetune.inputs import Encoded, encode
from multihop.eval.finetune.labeled import FineTuned, Member, TargetScale, finetune_labeled, predict, score_of
from multihop.eval.finetune.loop import NonFiniteLossError, finetune, linear_schedule
from multihop.eval.finetune.templates import template_of
from multihop.eval.tasks.known_tasks import load_task
from multihop.eval.tasks.task import Example, Task
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES

Sets = dict[str, Encoded]


def _encoded(task: Task, data: Path, family: str = "bert", seq_len: int = 64) -> Sets:
    info = open_dataset(data).manifest.tokenizer
    tokenizer = load(data / info.file)
    template = template_of(family, info.special_ids, info.vocab_size)
    sets = {"train": task.train, "dev": task.dev, "test": task.test, **task.other_sets, **task.unlabeled}
    both = task.symmetric and FAMILIES[family].causal
    return {name: encode(part, task.kind, tokenizer, template, seq_len, both) for name, part in sets.items()}


def _model(config: ModelConfig, data: Path, task: Task, seed: int) -> TaskModel:
    encoder = build_model(config, open_dataset(data).manifest.tokenizer.vocab_size)
    init_weights(encoder, seed)
    return TaskModel(encoder, task, seed)


def _run(
    config: ModelConfig, data: Path, task: Task, settings: TrialSettings, seed: int
) -> tuple[FineTuned, TaskModel]:
    model = _model(config, data, task, seed)
    return finetune_labeled(Member(model, _encoded(task, data, config.family), seed), task, settings), model


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.usefixtures("bbc", "one_thread")
def test_bert_learns_classes(bert: ModelConfig, bert_data: Path, quick: TrialSettings) -> None:
    settings = quick.model_copy(update={"epochs": 8})
    result, _ = _run(bert, bert_data, load_task("bbc-topics", None), settings, 0)
    assert result.value > 0.8 > 2 * result.other_metrics["largest class"]
    assert result.history.dev_value > 0.8


@pytest.mark.usefixtures("bbc", "one_thread")
def test_gpt2_learns_classes_from_its_last_token(gpt2: ModelConfig, gpt2_data: Path, quick: TrialSettings) -> None:
    result, _ = _run(gpt2, gpt2_data, load_task("bbc-topics", None), quick, 0)
    assert result.value > 0.8


@pytest.mark.usefixtures("conll", "one_thread")
def test_names_are_learned(bert: ModelConfig, bert_data: Path, quick: TrialSettings) -> None:
    settings = quick.model_copy(update={"epochs": 12, "batch_size": 4})
    result, _ = _run(bert, bert_data, load_task("conll2003", None), settings, 0)
    assert result.value > 0.8
    assert set(result.other_metrics) == {"precision", "recall"}


@pytest.mark.usefixtures("one_thread")
def test_scores_are_learned_on_their_own_scale(
    bert: ModelConfig, bert_data: Path, quick: TrialSettings, reviews: Path
) -> None:
    task = load_task("vader-reviews", str(reviews))
    result, model = _run(bert, bert_data, task, quick, 0)
    assert result.value > 0.6 and result.other_metrics["Spearman"] > 0.6
    sets = _encoded(task, bert_data)
    scale = TargetScale.of(sets["train"])
    answers = np.concatenate(predict(model, task, sets["test"], scale).answers)
    assert np.abs(answers - sets["test"].targets).mean() < scale.std


@pytest.mark.usefixtures("bbc", "one_thread")
def test_a_seed_decides_everything(bert: ModelConfig, bert_data: Path) -> None:
    settings = TrialSettings(epochs=1.5, lr=1e-3, seq_len=32)
    task = load_task("bbc-topics", None)
    first, model = _run(bert, bert_data, task, settings, 3)
    torch.manual_seed(999)  # whatever else drew random numbers before
    again, same = _run(bert, bert_data, task, settings, 3)
    assert (first.value, first.history) == (again.value, again.history)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
    other = _run(bert, bert_data, task, settings, 4)[1]
    assert not torch.equal(model.head.weight, other.head.weight)


@pytest.mark.usefixtures("bbc", "one_thread")
def test_the_best_epochs_weights_are_those_that_are_scored(
    bert: ModelConfig, bert_data: Path, quick: TrialSettings
) -> None:
    task = load_task("bbc-topics", None)
    result, model = _run(bert, bert_data, task, quick, 1)
    sets = _encoded(task, bert_data)
    for name, value in (("dev", result.history.dev_value), ("test", result.value)):
        predicted = predict(model, task, sets[name], TargetScale.of(sets["train"]))
        assert score_of(task, sets[name], predicted)[0] == value
    assert (
        max(score for _, score in result.history.dev_curve) == result.history.dev_value
        and len(result.history.dev_curve) == 4
    )
    assert result.history.loss_curve[-1][1] < result.history.loss_curve[0][1]
    assert result.history.best_epoch in (1, 2, 3, 4)


@pytest.mark.usefixtures("bbc", "one_thread")
def test_the_probabilities_of_two_models_are_averaged(
    bert: ModelConfig, gpt2: ModelConfig, bert_data: Path, gpt2_data: Path
) -> None:
    task, settings = load_task("bbc-topics", None), TrialSettings(epochs=1, lr=1e-3, seq_len=32)
    (one, _), (two, _) = (_run(*each, task, settings, 2) for each in ((bert, bert_data), (gpt2, gpt2_data)))
    other = Member(_model(gpt2, gpt2_data, task, 2), _encoded(task, gpt2_data, "gpt2"), 2)
    sets = _encoded(task, bert_data)
    both = finetune_labeled(Member(_model(bert, bert_data, task, 2), sets, 2), task, settings, [other])
    rows = zip(both.predicted.probabilities, one.predicted.probabilities, two.predicted.probabilities, strict=True)
    for mean, first, second in rows:
        np.testing.assert_allclose(mean, (first + second) / 2)
    assert [answer.tolist() for answer in both.predicted.answers] == [
        [row.argmax()] for row in both.predicted.probabilities
    ]
    assert both.value == score_of(task, sets["test"], both.predicted)[0]
    assert both.history.loss_curve == one.history.loss_curve


@pytest.mark.usefixtures("bbc", "one_thread")
def test_a_loss_that_is_not_finite_is_an_error(bert: ModelConfig, bert_data: Path) -> None:
    task = load_task("bbc-topics", None)
    model = _model(bert, bert_data, task, 0)
    with torch.no_grad():
        model.head.weight.fill_(math.inf)
    with pytest.raises(NonFiniteLossError, match="at step 1 of"):
        finetune_labeled(Member(model, _encoded(task, bert_data), 0), task, TrialSettings(epochs=1))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("lr", "steep", "message"),
    [
        (1e30, False, "the development score became nan at step 1 of 1"),
        (1e-3, True, "the gradient became (nan|inf) at step 1 of 1"),
    ],
)
def test_a_non_finite_gradient_or_score_after_a_finite_loss_is_an_error(lr: float, steep: bool, message: str) -> None:
    """After the last step no loss would show it, and the score of such weights may look like one."""
    model, inputs = torch.nn.Linear(4, 1), torch.ones(8, 4)

    def loss_of(_: NDArray[np.int64]) -> torch.Tensor:
        loss = model(inputs).square().mean()
        return loss + (loss - loss.detach()).sqrt() if steep else loss  # the root of 0 has no slope

    def dev_score() -> float:
        return 0.0 * model(1e20 * inputs).mean().item()

    with pytest.raises(NonFiniteLossError, match=message):
        finetune(model, np.ones(8, np.int64), loss_of, dev_score, TrialSettings(lr=lr, epochs=1, batch_size=8), 0)


@pytest.mark.usefixtures("conll", "one_thread")
def test_padding_changes_nothing_and_cut_words_are_outside(bert: ModelConfig, bert_data: Path) -> None:
    task = load_task("conll2003", None)
    model = _model(bert, bert_data, task, 0).eval()
    with torch.no_grad():
        model.head.bias[0] = -9.0  # never "outside", unless nothing was asked
    test = _encoded(task, bert_data, seq_len=12)["test"]
    together = predict(model, task, test, TargetScale(0, 1)).answers
    device, kept = torch.device("cpu"), np.diff(test.cu_words[test.cu_examples])
    with torch.no_grad():
        outputs = model(**to_device(test.collate(range(len(test))), device)).split(kept.tolist())
        for example, answers in enumerate(together):
            alone = model(**to_device(test.collate([example]), device))
            assert torch.allclose(alone, outputs[example], atol=1e-5)
            assert alone.argmax(-1).tolist() == answers[: kept[example]].tolist()
            assert len(answers) == len(test.targets_of(example)) and (answers[kept[example] :] == 0).all()
            assert (answers[: kept[example]] > 0).all()
    assert any(kept < np.diff(test.cu_targets))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("labels", [("O", "B-LOC"), ("B-LOC", "I-LOC", "O"), ("ADJ", "NOUN")])
def test_cut_words_get_the_outside_label_or_count_as_wrong_without_one(
    labels: tuple[str, ...], bert: ModelConfig, bert_data: Path
) -> None:
    words, entities = ("Paris", *["river"] * 99), "O" in labels
    targets = (float(labels.index("B-LOC")), *[float(labels.index("O"))] * 99) if entities else (0.0,) * 100
    examples, metric = (Example(words, targets),) * 3, "entity F1" if entities else "accuracy"
    task = Task("own", "tagging", metric, True, "", labels, examples, examples, examples)
    model = _model(bert, bert_data, task, 0).eval()
    with torch.no_grad():  # a model that always says the second word's label
        model.head.weight.zero_()
        model.head.bias[int(targets[1])] = 9.0
    test = _encoded(task, bert_data, seq_len=16)["test"]
    read = int(np.diff(test.cu_words)[0])
    predicted = predict(model, task, test, TargetScale(0, 1))
    value, others = score_of(task, test, predicted)
    assert 0 < read < 20
    if entities:
        assert all((answers == labels.index("O")).all() for answers in predicted.answers)
        assert (value, others) == (0.0, {"precision": 0.0, "recall": 0.0})
    else:
        assert value == read / 100


def _pairs(name: str, count: int) -> tuple[Example, ...]:
    """Return examples that ask whether one of the two texts is "river"."""
    words = ("river", "stone", "letter", "garden")
    pairs = [(words[i % 4], words[i // 4 % 4]) for i in range(count)]
    return tuple(Example(pair, (float("river" in pair),), f"{name}{i}") for i, pair in enumerate(pairs))


def _choices(count: int) -> tuple[Example, ...]:
    """Return examples that ask which of two or three words is "river"."""
    words = ("stone", "letter", "garden")
    made = []
    for i in range(count):
        others = [words[i % 3], words[i // 3 % 3]][: 1 + i % 2]
        others.insert(i % (len(others) + 1), "river")
        made.append(Example(("find it", *others), (float(others.index("river")),)))
    return tuple(made)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["bert", "gpt2", "modernbert", "modernbert_decoder", "xlnet"])
def test_pairs_choices_and_further_sets(family: str, request: pytest.FixtureRequest, quick: TrialSettings) -> None:
    config: ModelConfig = request.getfixturevalue(family)
    data = request.getfixturevalue("gpt2_data" if FAMILIES[config.family].reads_one_way else "bert_data")
    task = Task(
        name="same",
        kind="classification",
        metric="accuracy",
        higher_is_better=True,
        source="",
        labels=("no", "yes"),
        symmetric=True,
        train=_pairs("train", 160),
        dev=_pairs("dev", 16),
        test=_pairs("test", 16),
        other_sets={"mismatched": _pairs("other", 8)},
        unlabeled={"same.tsv": tuple(Example(e.texts, (), e.id) for e in _pairs("u", 16))},
    )
    settings = quick.model_copy(update={"epochs": 10.0})
    result, _ = _run(config, data, task, settings, 0)
    assert result.value == 1.0 == result.other_metrics["mismatched accuracy"]
    assert [p.tolist() for p in result.unlabeled["same.tsv"].answers] == [p.tolist() for p in result.predicted.answers]
    assert all(row.sum() == pytest.approx(1) for row in result.predicted.probabilities)

    choice = replace(task, kind="choice", labels=(), train=_choices(144), dev=_choices(12), test=_choices(12))
    choice = replace(choice, other_sets={}, unlabeled={}, symmetric=False)
    result, _ = _run(config, data, choice, settings, 0)
    assert result.value == 1.0
    present = [len(example.texts) - 1 for example in choice.test]
    assert [np.count_nonzero(row) for row in result.predicted.probabilities] == present


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 137])
def test_the_rate_climbs_for_a_tenth_and_falls_to_almost_nothing(steps: int) -> None:
    factors = [linear_schedule(step, steps, 0.1) for step in range(steps)]
    peak = factors.index(max(factors))
    assert max(factors) == 1.0 and peak == max(1, round(steps / 10)) - 1
    assert factors[: peak + 1] == sorted(factors[: peak + 1]) and all(f > 0 for f in factors)
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert linear_schedule(steps, steps, 0.1) == 0.0
