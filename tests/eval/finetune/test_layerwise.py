"""Fine-tuning by layer: slanted triangular rates, a rate for each group of layers, gradual unfreezing, and pooling."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds_of_families import TEXT_FAMILIES, model_section
from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.tokenizer import load
from multihop.eval.config import EvalConfig, Features, TrialSettings
from multihop.eval.finetune.heads import TaskModel
from multihop.eval.finetune.inputs import encode
from multihop.eval.finetune.labeled import Member, TargetScale, finetune_labeled, loss_of
from multihop.eval.finetune.loop import finetune, parameter_groups, slanted_triangular
from multihop.eval.finetune.templates import template_of
from multihop.eval.model.pooling import concat_pool, mean_pool
from multihop.eval.tasks.known_tasks import load_task, open_tasks
from multihop.eval.tasks.task import Task
from multihop.eval.trials.check import check_average, check_settings
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES, parse_model_config

SIZES = {"layers": 2, "hidden": 16, "heads": 2, "embedding": 8, "max_positions": 64, "dropout": 0.1}


def config_of(family: str, **others: Any) -> ModelConfig:
    return parse_model_config(model_section(family, **{**SIZES, **others}))


def model_of(family: str, data: Path, task: Task, **others: Any) -> TaskModel:
    encoder = build_model(config_of(family), open_dataset(data).manifest.tokenizer.vocab_size)
    init_weights(encoder, 1)
    return TaskModel(encoder, task, 1, **others)


def encoded(task: Task, data: Path, family: str) -> Any:
    info = open_dataset(data).manifest.tokenizer
    template = template_of(family, info.special_ids, info.vocab_size)
    tokenizer = load(data / info.file)
    return {
        name: encode(getattr(task, name)[:24], task.kind, tokenizer, template, 24) for name in ("train", "dev", "test")
    }


@pytest.fixture
def data_of(request: pytest.FixtureRequest) -> Any:
    return lambda family: request.getfixturevalue("gpt2_data" if FAMILIES[family].reads_one_way else "bert_data")


@given(tenths=st.integers(1, 9), times=st.integers(1, 40))
def test_slanted_triangular_rates_are_those_of_the_equation(tenths: int, times: int) -> None:
    steps, cut_frac = 10 * times, tenths / 10
    cut = tenths * times
    for step in range(steps):
        p = step / cut if step < cut else 1 - (step - cut) / (cut * (10 / tenths - 1))
        assert slanted_triangular(step, steps, cut_frac) == pytest.approx((1 + p * 31) / 32)


@given(steps=st.integers(1, 300), cut_frac=st.floats(0.001, 0.999))
def test_a_slanted_triangular_rate_stays_between_a_32nd_and_the_peak(steps: int, cut_frac: float) -> None:
    factors = [slanted_triangular(step, steps, cut_frac) for step in range(steps + 1)]
    assert all(1 / 32 <= factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors == sorted(factors[:peak]) + sorted(factors[peak:], reverse=True)


@pytest.mark.usefixtures("bbc")
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_group_of_layers_has_the_rate_of_the_one_above_times_the_decay(family: str, data_of: Any) -> None:
    model = model_of(family, data_of(family), load_task("bbc-topics", None))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = TrialSettings(lr=0.01, layer_lr_decay=0.5, weight_decay=0.1)
    groups: Any = parameter_groups(model, settings, model.layer_groups())
    found = {names[id(parameter)]: group for group in groups for parameter in group["params"]}
    assert found.keys() == {*names.values()} and sum(len(group["params"]) for group in groups) == len(names)
    depth = config_of(family).num_layer_groups - 1
    assert found["head.weight"]["lr"] == 0.01 and found["encoder.word.weight"]["lr"] == 0.01 * 0.5**depth
    assert {group["lr"] for group in groups} == {0.01 * 0.5**each for each in range(depth + 1)}
    assert (found["head.weight"]["weight_decay"], found["head.bias"]["weight_decay"]) == (0.1, 0.0)
    plain: Any = parameter_groups(model, TrialSettings(lr=0.01), model.layer_groups())
    assert len(plain) == 2 and {group["lr"] for group in plain} == {0.01}


@pytest.mark.usefixtures("bbc")
@pytest.mark.parametrize("family", ["awd-lstm", "awd-lstm-backward", "bert", "albert", "gpt2"])
def test_one_more_group_is_trained_in_each_epoch(family: str, data_of: Any) -> None:
    torch.set_num_threads(1)
    task = load_task("bbc-topics", None)
    model = model_of(family, data_of(family), task)
    train = encoded(task, data_of(family), family)["train"]
    groups = model.layer_groups()
    before = [[parameter.detach().clone() for parameter in group] for group in groups]
    trained: list[list[bool]] = []

    def dev_score() -> float:
        trained.append(
            [
                any(not torch.equal(one, other) for one, other in zip(group, first, strict=True))
                for group, first in zip(groups, before, strict=True)
            ]
        )
        return float(len(trained))

    settings = TrialSettings(epochs=len(groups) + 1, lr=0.01, batch_size=8, gradual_unfreezing=True)
    scale = TargetScale(0, 1)
    finetune(model, train.lengths, lambda batch: loss_of(model, train, batch, scale), dev_score, settings, 0, groups)
    count = len(groups)
    assert trained == [[depth < epoch for depth in reversed(range(count))] for epoch in (*range(1, count + 1), count)]


@pytest.mark.usefixtures("bbc")
@pytest.mark.parametrize("family", ["awd-lstm", "awd-lstm-backward", "bert", "gpt2"])
def test_all_settings_together_are_trained_and_repeatable(family: str, data_of: Any) -> None:
    torch.set_num_threads(1)
    task = load_task("bbc-topics", None)
    sets = encoded(task, data_of(family), family)
    settings = TrialSettings(epochs=4, lr=0.01, batch_size=8, pooling="concat").model_copy(
        update={"schedule": "slanted_triangular", "layer_lr_decay": 1 / 2.6, "gradual_unfreezing": True}
    )
    histories = []
    for _ in range(2):
        model = model_of(family, data_of(family), task, pooling="concat")
        histories.append(finetune_labeled(Member(model, sets, 0), task, settings).history)
    assert histories[0] == histories[1] and len(histories[0].dev_curve) == 4
    assert histories[0].loss_curve[-1][1] < histories[0].loss_curve[0][1]


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_concat_is_the_last_state_the_maxima_and_the_mean(lengths: list[int]) -> None:
    states = torch.randn(sum(lengths), 4, generator=torch.Generator().manual_seed(sum(lengths)))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    for reads_backward, at in ((False, -1), (True, 0)):
        expected = [torch.cat([each[at], each.amax(0), each.mean(0)]) for each in states.split(lengths)]
        torch.testing.assert_close(concat_pool(states, bounds, reads_backward), torch.stack(expected))


@pytest.mark.usefixtures("bbc")
def test_the_head_reads_concat_and_a_frozen_model_its_mean(bert_data: Path) -> None:
    task = load_task("bbc-topics", None)
    model = model_of("bert", bert_data, task, pooling="concat").eval()
    assert model.head.in_features == 48
    test = encoded(task, bert_data, "bert")["test"]
    inputs = to_device(test.collate(np.arange(3)), torch.device("cpu"))
    states = model.encoder.encode(inputs["packed"])
    expected = model.head(concat_pool(states, inputs["packed"].cu_seqlens))
    torch.testing.assert_close(model(**inputs), expected)
    features = Features(layers=[-1], head="linear")
    frozen = model_of("bert", bert_data, task, pooling="concat", features=features).eval()
    expected = frozen.head(mean_pool(states, inputs["packed"].cu_seqlens))
    torch.testing.assert_close(frozen(**inputs), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_lr_decay": 0.0}, "greater than 0"),
        ({"layer_lr_decay": 1.5}, "less than or equal to 1"),
        ({"warmup_ratio": 1.0}, "less than 1"),
        ({"schedule": "cosine"}, "'linear' or 'slanted_triangular'"),
        ({"pooling": "median"}, "'family', 'mean', 'max' or 'concat'"),
    ],
)
def test_values_outside_their_ranges_are_refused(settings: dict[str, Any], message: str) -> None:
    for config in (settings, {"tasks": [{"name": "bbc-topics", **settings}]}):
        with pytest.raises(ValidationError, match=message):
            EvalConfig.model_validate(config)


@pytest.mark.usefixtures("bbc")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"gradual_unfreezing": True, "epochs": [9, 3]},
            "gradual_unfreezing=true of task bbc-topics unfreezes one of the model's 4 groups of layers (embeddings, "
            "blocks, head) an epoch, but epochs=3; set at least epochs=4",
        ),
        (
            {"schedule": "slanted_triangular", "warmup_ratio": 0},
            "schedule=slanted_triangular of task bbc-topics grows over warmup_ratio=0.0 of the steps; set warmup_ratio "
            "between 0 and 1, such as 0.1",
        ),
        (
            {"layer_lr_decay": 0.5, "features": {"layers": [-1]}},
            "layer_lr_decay of task bbc-topics trains layers that its features freeze; remove layer_lr_decay or "
            "features",
        ),
        (
            {"features": {"layers": [0, 1], "combine": "mix"}},
            "combine=mix adds states, but features.layers=[0, 1] have widths 8 and 16; set layers of one width, or "
            "features.combine=concat",
        ),
        ({"dropout": 0.9}, "weight_dropout, which grows with it, would be 1.125"),
    ],
)
def test_impossible_settings_are_refused_before_anything_runs(settings: dict[str, Any], message: str) -> None:
    for content in ({"tasks": ["bbc-topics"], **settings}, {"tasks": [{"name": "bbc-topics", **settings}]}):
        config = EvalConfig.model_validate(content)
        with pytest.raises(UserError, match=re.escape(message)):
            check_settings(config, open_tasks(config), config_of("awd-lstm"))
    fine = {"gradual_unfreezing": True, "epochs": 4, "schedule": "slanted_triangular", "layer_lr_decay": 0.4}
    config = EvalConfig.model_validate({"tasks": ["bbc-topics"], **fine})
    check_settings(config, open_tasks(config), config_of("awd-lstm"))


@pytest.mark.parametrize(
    ("eval_keys", "family", "message"),
    [
        (
            {"tasks": ["conll2003"]},
            "gpt2",
            "eval.average_with=runs/other averages the probabilities of classes or choices, but task conll2003 is "
            "of kind tagging; remove the task, or set eval.average_with=null",
        ),
        ({"tasks": ["heldout-perplexity"]}, "gpt2", "task heldout-perplexity is of kind zero-shot"),
        (
            {"tasks": ["bbc-topics", {"name": "conll2003", "start_from": "bbc-topics"}]},
            "gpt2",
            "task conll2003 starts from the weights of bbc-topics, which are those of one model; remove start_from",
        ),
        (
            {"tasks": ["bbc-topics"]},
            "transformer",
            "eval.average_with=runs/other is a model of family transformer, which translates; set another one",
        ),
        (
            {"tasks": ["bbc-topics"], "features": {"layers": [9]}},
            "gpt2",
            "the model has 2 layers and no hidden state 9",
        ),
    ],
)
@pytest.mark.usefixtures("bbc", "conll")
def test_what_cannot_be_averaged_with_another_model_is_refused(
    eval_keys: dict[str, Any], family: str, message: str
) -> None:
    config = EvalConfig.model_validate({"average_with": "runs/other", **eval_keys})
    with pytest.raises(UserError, match=re.escape(message)):
        check_average(config, open_tasks(config), config_of(family))


def test_settings_that_are_not_set_are_no_part_of_a_trial() -> None:
    names = {"schedule", "layer_lr_decay", "gradual_unfreezing"}
    assert not names & TrialSettings().model_dump(mode="json").keys()
    written = TrialSettings(layer_lr_decay=0.5).model_dump(mode="json")
    assert names & written.keys() == {"layer_lr_decay"} and TrialSettings.model_validate(written).layer_lr_decay == 0.5
