"""Features of a frozen model: which states are read, what is trained on top, and what does not change."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.common.json_lines import Row
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.tokenizer import load
from multihop.eval.config import EvalConfig, Features, TrialSettings
from multihop.eval.finetune.heads import FeatureReader, TaskModel
from multihop.eval.finetune.inputs import Encoded, encode
from multihop.eval.finetune.labeled import Member, finetune_labeled
from multihop.eval.finetune.templates import template_of
from multihop.eval.model.model_under_test import of_run
from multihop.eval.model.pooling import mean_pool
from multihop.eval.tasks.known_tasks import load_task, open_tasks
from multihop.eval.tasks.task import Task
from multihop.eval.trials.check import check_settings
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.run_trial import run_trial
from multihop.eval.trials.trial import trial_key
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES, parse_model_config

Checkpoint = Callable[[ModelConfig, Path], tuple[str, str]]
CPU = torch.device("cpu")
LINEAR = Features(layers=[0, -1], head="linear")


def _check_settings(config: EvalConfig, layers: int) -> None:
    sizes = {"family": "bert", "layers": layers, "hidden": 4, "heads": 1, "max_positions": 8}
    check_settings(config, open_tasks(config), parse_model_config(sizes))


def _reader(features: Features, layers: int = 3, hidden: int = 4) -> FeatureReader:
    return FeatureReader(features, [hidden] * (layers + 1), torch.Generator().manual_seed(1))


def _model(config: ModelConfig, data: Path, task: Task, features: Features | None, seed: int = 0) -> TaskModel:
    encoder = build_model(config, open_dataset(data).manifest.tokenizer.vocab_size)
    init_weights(encoder, seed)
    return TaskModel(encoder, task, seed, features=features)


def _encoded(task: Task, data: Path, family: str, seq_len: int = 32) -> dict[str, Encoded]:
    info = open_dataset(data).manifest.tokenizer
    tokenizer, template = load(data / info.file), template_of(family, info.special_ids, info.vocab_size, frozen=True)
    sets = {"train": task.train, "dev": task.dev, "test": task.test}
    return {name: encode(part, task.kind, tokenizer, template, seq_len) for name, part in sets.items()}


@given(st.data())
def test_states_are_counted_from_both_ends(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 24))
    chosen = data.draw(st.lists(st.integers(0, layers), min_size=1, unique=True))
    given_as = [data.draw(st.sampled_from([i, i - layers - 1])) for i in chosen]
    assert Features(layers=given_as).indexes(layers) == chosen


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([-1, 13], r"has 12 layers and no hidden state 13; expected 0 \(the embeddings\) to 12, or -13 to -1"),
        ([-14], "no hidden state -14"),
        ([12, -1], "names hidden state 12 of 12 twice; remove one"),
    ],
)
def test_layers_that_a_model_does_not_have_are_refused(layers: list[int], message: str) -> None:
    features = {"layers": layers}
    for config in ({"features": features}, {"tasks": [{"name": "bbc-topics", "features": features}]}):
        with pytest.raises(UserError, match=message):
            _check_settings(EvalConfig.model_validate(config), 12)
    _check_settings(EvalConfig(features=Features()), 4)
    with pytest.raises(ValidationError, match="at least 1 item"):
        EvalConfig.model_validate({"features": {"layers": []}})


def test_states_are_combined_as_published() -> None:
    states = list(torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(3)))
    cu_seqlens = torch.tensor([0, 2, 5])

    def read(combine: Any) -> tuple[FeatureReader, torch.Tensor]:
        reader = _reader(Features(layers=[-1, 1], combine=combine, head="linear"))
        return reader, reader(states, cu_seqlens)

    reader, joined = read("concat")
    assert torch.equal(joined, torch.cat([states[3], states[1]], 1)) and reader.width == 8
    assert torch.equal(read("sum")[1], states[3] + states[1])
    reader, mixed = read("mix")
    torch.testing.assert_close(mixed, (states[3] + states[1]) / 2)
    with torch.no_grad():
        reader.mix.copy_(torch.tensor([1.0, 2.0]))
        reader.scale.fill_(3.0)
    weights = torch.tensor([1.0, 2.0]).softmax(0)
    torch.testing.assert_close(reader(states, cu_seqlens), 3 * (weights[0] * states[3] + weights[1] * states[1]))
    assert reader.width == 4 and len(list(reader.parameters())) == 2
    assert reader.layer_weights() == {"below": {"3": pytest.approx(weights[0]), "1": pytest.approx(weights[1])}}
    assert read("sum")[0].layer_weights() == {}


def test_a_mix_beside_the_output_has_weights_of_its_own() -> None:
    states = list(torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(3)))
    reader = _reader(Features(layers=[0, -1], combine="mix_both"))
    with torch.no_grad():
        reader.mix_above.copy_(torch.tensor([1.0, 2.0]))
        reader.scale_above.fill_(3.0)
        read = reader(states, torch.tensor([0, 2, 5]))
    shares = torch.tensor([1.0, 2.0]).softmax(0)
    assert read.shape == (5, reader.width) == (5, 2 * 768 + 4)
    torch.testing.assert_close(read[:, 2 * 768 :], 3 * (shares[0] * states[0] + shares[1] * states[3]))
    assert reader.layer_weights() == {
        "below": {"0": 0.5, "3": 0.5}, "above": {"0": pytest.approx(shares[0]), "3": pytest.approx(shares[1])},
    }  # fmt: skip
    with pytest.raises(ValidationError, match="head=linear has none; set head=bilstm, or combine=mix"):
        Features(combine="mix_both", head="linear")


def test_taglm_reads_the_language_model_beside_the_output_of_the_first_layer() -> None:
    """Against torch's own layers with the same weights, for each sequence alone."""
    states = [torch.randn(5, width, generator=torch.Generator().manual_seed(width)) for width in (3, 4, 6)]
    features = Features(layers=[0, -1, 1], combine="taglm", head="bilstm_crf", lstm_width=7)
    reader = FeatureReader(features, [3, 4, 6], torch.Generator().manual_seed(1))
    lower, upper = (torch.nn.LSTM(inputs, 7, bidirectional=True) for inputs in (3, 14 + 6 + 4))
    lower.load_state_dict(reader.lstm.state_dict())  # type: ignore[union-attr]
    upper.load_state_dict(reader.upper_lstm.state_dict())  # type: ignore[union-attr]
    read = reader(states, torch.tensor([0, 2, 5]))
    for part in (slice(0, 2), slice(2, 5)):
        beside = torch.cat([lower(states[0][part])[0], states[2][part], states[1][part]], 1)
        torch.testing.assert_close(read[part], upper(beside)[0])
    assert reader.width == read.shape[1] == 14 and reader.layer_weights() == {}
    bound = 7**-0.5
    assert all(each.abs().max() <= bound and each.std() > bound / 3 for each in reader.parameters())
    with pytest.raises(ValidationError, match="head=linear has none"):
        Features(layers=[0, -1], combine="taglm", head="linear")
    with pytest.raises(ValidationError, match=r"but only one is given; set at least two, such as \[0, -1\]"):
        Features(layers=[-1], combine="taglm")


def test_the_width_of_the_lstm_is_part_of_a_trials_key_where_it_is_not_the_default() -> None:
    assert "lstm_width" not in Features().model_dump() and Features(lstm_width=32).model_dump()["lstm_width"] == 32
    assert Features.model_validate(Features().model_dump()) == Features()
    with pytest.raises(ValidationError, match="lstm_width=32 is for a BiLSTM, but head=linear has none; remove it"):
        Features(head="linear", lstm_width=32)


@pytest.mark.usefixtures("bbc")
def test_a_crf_is_for_tagging() -> None:
    crf = {"layers": [-1], "head": "bilstm_crf"}
    for config in ({"tasks": ["bbc-topics"], "features": crf}, {"tasks": [{"name": "bbc-topics", "features": crf}]}):
        with pytest.raises(UserError, match="is for tagging, but task bbc-topics is of kind classification"):
            _check_settings(EvalConfig.model_validate(config), 2)


@settings(max_examples=3)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_lstm_and_the_means_stay_within_each_sequence(lengths: list[int]) -> None:
    reader = _reader(Features(layers=[0, 2]))
    states = list(torch.randn(4, sum(lengths), 4, generator=torch.Generator().manual_seed(3)))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    with torch.no_grad():
        together = reader(states, cu_seqlens)
        assert together.shape == (sum(lengths), reader.width) == (sum(lengths), 2 * 768)
        for number, (start, stop) in enumerate(pairwise(cu_seqlens)):
            alone = reader([state[start:stop] for state in states], torch.tensor([0, stop - start]))
            torch.testing.assert_close(together[start:stop], alone)
            torch.testing.assert_close(mean_pool(together, cu_seqlens)[number], alone.mean(0))
    flipped = reader([state.flip(0) for state in states], torch.tensor([0, sum(lengths)]))
    if sum(lengths) > 1:
        assert not torch.allclose(flipped.flip(0), reader(states, torch.tensor([0, sum(lengths)])), atol=1e-4)


def test_a_seed_decides_the_lstm(bert: ModelConfig, bert_data: Path) -> None:
    task = Task("a", "classification", "accuracy", True, "", labels=("no", "yes"))
    first, same, other = (
        _model(bert, bert_data, task, Features(layers=[-1]), seed).features for seed in (1, 1, 2)
    )  # fmt: skip
    assert first is not None and same is not None and other is not None
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]) and not torch.equal(tensor, other.state_dict()[name])


@pytest.mark.usefixtures("bbc", "conll")
@pytest.mark.parametrize(
    ("family", "name", "features", "epochs"),
    [
        ("gpt2", "conll2003", Features(layers=[0, 1], combine="sum", lstm_width=32), 4),
        ("bert", "bbc-topics", LINEAR.model_copy(update={"combine": "mix"}), 8),
        ("gpt2", "bbc-topics", LINEAR, 8),
        ("modernbert", "bbc-topics", LINEAR, 8),
        ("modernbert_decoder", "conll2003", LINEAR, 8),
        ("xlnet", "bbc-topics", LINEAR, 8),
        ("bilm", "conll2003", Features(layers=[0, 1, 2], combine="mix_both", head="bilstm_crf", lstm_width=32), 4),
    ],
)
def test_what_is_on_top_learns_and_the_model_stays_as_it_was(
    family: str, name: str, features: Features, epochs: int, request: pytest.FixtureRequest
) -> None:
    torch.set_num_threads(1)
    config: ModelConfig = request.getfixturevalue(family)
    data = request.getfixturevalue("gpt2_data" if FAMILIES[config.family].causal else "bert_data")
    task = load_task(name, None)
    model = _model(config, data, task, features)
    before = {key: tensor.clone() for key, tensor in model.encoder.state_dict().items()}
    trained = {key: p.detach().clone() for key, p in model.named_parameters() if p.requires_grad}
    settings = TrialSettings(epochs=epochs, lr=1e-2, batch_size=8, seq_len=32)
    result = finetune_labeled(Member(model, _encoded(task, data, config.family), 0), task, settings)
    assert result.value > 0.8
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.encoder.state_dict().items())
    assert trained and not any(key.startswith("encoder.") for key in trained)
    assert all(not torch.equal(p, trained[key]) for key, p in model.named_parameters() if key in trained)
    # Nothing was added to the vocabulary of a causal model: its rows would have to be learned.
    assert model.encoder.word.num_embeddings == open_dataset(data).manifest.tokenizer.vocab_size
    if features.head == "linear":
        everything = sum(p.numel() for p in _model(config, data, task, None).parameters())
        assert sum(p.numel() for p in trained.values()) < everything / 10


@pytest.mark.usefixtures("conll")
def test_the_row_of_a_trial_has_the_learned_weights_of_the_layers(
    bilm: ModelConfig, bert_data: Path, checkpoint: Checkpoint
) -> None:
    features = {"layers": [0, 1, -1], "combine": "mix", "head": "bilstm_crf", "lstm_width": 32}
    config = EvalConfig.model_validate(
        {
            "tasks": [{"name": "conll2003", "features": features}, "conll2003-pos"], "seeds": [0], "epochs": 1,
            "seq_len": 32, "inits": ["pretrained"], "max_examples": 8, "lr": 1e-2,
        }
    )  # fmt: skip
    evaluated = of_run(bilm, *checkpoint(bilm, bert_data), 7, bert_data, open_dataset(bert_data).manifest)
    mixed, plain = (run_trial(trial).row for trial in plan_trials(config, open_tasks(config), evaluated))
    assert mixed["status"] == plain["status"] == "ok" and "layer_weights" not in plain
    shares = json.loads(json.dumps(mixed))["layer_weights"]["below"]
    assert shares.keys() == {"0", "1", "2"} and sum(shares.values()) == pytest.approx(1)
    assert all(share != 1 / 3 for share in shares.values())


@pytest.mark.usefixtures("conll")
def test_a_frozen_model_has_no_dropout(bert: ModelConfig, bert_data: Path) -> None:
    task = load_task("conll2003", None)
    model = _model(bert.model_copy(update={"dropout": 0.5}), bert_data, task, LINEAR).train()
    inputs = to_device(_encoded(task, bert_data, "bert")["dev"].collate(range(4)), CPU)
    model.dropout.p = 0.0
    first, again = model(**inputs), model(**inputs)
    assert model.head.training and torch.equal(first, again)
    first.sum().backward()
    assert all(p.grad is None for p in model.encoder.parameters())


def test_a_frozen_causal_model_reads_no_token_that_pretraining_has_not_seen() -> None:
    template = template_of("gpt2", {"end": 3, "unk": 1}, 100, frozen=True)
    assert (template.before, template.between, template.after, template.unknown) == ((3,), (3,), (3,), 1)
    special = {"cls": 2, "sep": 3, "unk": 1}
    assert template_of("bert", special, 100, frozen=True) == template_of("bert", special, 100)


def _choice_and_pair_files(folder: Path) -> None:
    words = ("river", "stone", "letter", "garden")
    rows = [
        {"a": words[i % 4], "b": words[i // 4 % 4], "same": int(i % 4 == i // 4 % 4), "right": i % 2}
        for i in range(64)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "train: rows.jsonl\ndev: rows.jsonl\ntest: rows.jsonl\n"
    (folder / "pairs.yaml").write_text(f"kind: regression\n{files}fields: {{text: [a, b], label: same}}\n")
    (folder / "choices.yaml").write_text(
        f"kind: choice\n{files}fields: {{text: a, choices: [a, b], label: right}}\nlabels: ['0', '1']\n"
    )


def _squad(folder: Path) -> None:
    (folder / "squad").mkdir()
    for name in ("train", "dev"):
        paragraphs = [
            {"context": f"the captain {word}", "qas": [
                {"id": f"{name}{word}", "question": "who", "answers": [{"text": "captain", "answer_start": 4}]}
            ]}
            for word in ("river", "stone", "letter", "garden")
        ]  # fmt: skip
        content = {"version": "1.1", "data": [{"paragraphs": paragraphs}]}
        (folder / "squad" / f"{name}-v1.1.json").write_text(json.dumps(content))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_every_kind_of_task_can_be_done_with_a_frozen_model(
    family: str, request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model, data = (request.getfixturevalue(fixture) for fixture in (family, f"{family}_data"))
    model = model.model_copy(update={"max_positions": 96})
    _choice_and_pair_files(tmp_path)
    _squad(tmp_path)
    given = {
        "tasks": [str(tmp_path / "pairs.yaml"), str(tmp_path / "choices.yaml"), "squad1"],
        "features": {"layers": [-1], "lstm_width": 32}, "seeds": [0], "epochs": 1, "seq_len": 80,
        "data_dir": str(tmp_path),
        "max_examples": 8,
    }  # fmt: skip
    config = EvalConfig.model_validate(given)
    evaluated = of_run(model, *checkpoint(model, data), 7, data, open_dataset(data).manifest)
    trials = [trial for trial in plan_trials(config, open_tasks(config), evaluated) if trial.init == "pretrained"]
    rows: list[Row] = [json.loads(json.dumps(run_trial(trial).row)) for trial in trials]
    assert [(row["kind"], row["status"]) for row in rows] == [("regression", "ok"), ("choice", "ok"), ("spans", "ok")]
    for row in rows:
        features = {"layers": [-1], "combine": "concat", "head": "bilstm", "lstm_width": 32}
        assert row["hyperparameters"]["features"] == features
    # The recipe's rows are found again, and those of another reading are not.
    keys = {row["key"] for row in rows}
    for read_otherwise in (None, {"layers": [-1], "head": "linear"}, {"layers": [-1]}):
        other = EvalConfig.model_validate({**given, "features": read_otherwise})
        others = plan_trials(other, open_tasks(other), evaluated)
        assert keys.isdisjoint(map(trial_key, others)) and not keys.isdisjoint(map(trial_key, trials))
