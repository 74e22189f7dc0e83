"""Trials of each kind, from the files of a task to a row, also of Hugging Face models."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from multihop.common.errors import UserError
from multihop.common.json_lines import Row
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.export import export_tokenizer
from multihop.eval.config import EvalConfig
from multihop.eval.model.model_under_test import ModelUnderTest, of_huggingface, of_run
from multihop.eval.tasks.known_tasks import open_tasks
from multihop.eval.trials.check import check_tasks
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.run_trial import run_trial
from multihop.eval.trials.trial import Trial
from multihop.eval.trials.write_predictions import write_predictions
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.models.config import ModelConfig

Checkpoint = Callable[[ModelConfig, Path], tuple[str, str]]
WORDS = ("river", "stone", "letter", "garden")


def _check_tasks(config: EvalConfig, family: str) -> None:
    check_tasks(config, open_tasks(config), family)


def _plan_trials(config: EvalConfig, evaluated: ModelUnderTest) -> list[Trial]:
    return plan_trials(config, open_tasks(config), evaluated)


def _model_under_test(model: ModelConfig, data: Path, checkpoint: Checkpoint) -> ModelUnderTest:
    return of_run(model, *checkpoint(model, data), 7, data, open_dataset(data).manifest)


def _config(task: Any, folder: Path, **settings: Any) -> EvalConfig:
    common = {"tasks": [task], "seeds": [0], "data_dir": str(folder), "lr": 3e-3, "batch_size": 8}
    return EvalConfig.model_validate(common | settings)


def _rows(config: EvalConfig, evaluated: ModelUnderTest) -> list[Row]:
    _check_tasks(config, evaluated.model.family)
    return [run_trial(trial).row for trial in _plan_trials(config, evaluated)]


def test_a_users_own_csv(
    bert: ModelConfig, bert_data: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f'"{WORDS[i % 4]}, number {i}",{"wet" if i % 4 == 0 else "dry"}' for i in range(200)]
    (tmp_path / "labeled.csv").write_text("\n".join(["what,how", *lines]))
    Path("weather.yaml").write_text(
        "kind: classification\ntrain: labeled.csv\nfields: {text: what, label: how}\nmetric: F1\n"
    )
    for row in _rows(_config("weather.yaml", tmp_path, epochs=6), _model_under_test(bert, bert_data, checkpoint)):
        assert (row["task"], row["metric"], row["status"], row["labels"]) == ("weather", "F1", "ok", ["dry", "wet"])
        assert row["value"] > 0.9 and row["reported_on"] == "test"
    [trial, _] = _plan_trials(
        _config("weather.yaml", tmp_path), _model_under_test(bert, bert_data, lambda *_: ("a", "b"))
    )
    assert trial.task == str(tmp_path / "weather.yaml")  # workers start elsewhere
    shutil.copy("weather.yaml", "conll2003.yaml")
    with pytest.raises(UserError, match="describes a task named conll2003, and so does another one; rename the file"):
        _check_tasks(_config("conll2003.yaml", tmp_path), "bert")


def _squad(folder: Path, name: str, count: int) -> None:
    """Write questions that ask which word follows "the"; without a "the" there is no answer."""
    paragraphs = []
    for i in range(count):
        word, others = WORDS[i % 4], " ".join(WORDS[i % 3 : i % 3 + 2])
        text = f"{others} captain the {word} {others}" if i % 3 else f"{others} captain {word} {others}"
        answers = [{"text": word, "answer_start": text.index("the ") + 4}] if i % 3 else []
        asked = {"id": f"{name}{i}", "question": "which", "answers": answers, "is_impossible": not answers}
        paragraphs.append({"context": text, "qas": [asked]})
    (folder / f"{name}-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))


def test_answer_spans(bert: ModelConfig, bert_data: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "squad").mkdir()
    for name, count in (("train", 240), ("dev", 48)):
        _squad(tmp_path / "squad", name, count)
    config = _config("squad2", tmp_path, epochs=12, seq_len=80, report_on="dev")
    positions = bert.model_copy(update={"max_positions": 96})
    trial, other = _plan_trials(config, _model_under_test(positions, bert_data, checkpoint))
    outcome = run_trial(trial)
    row, found = outcome.row, outcome.predictions
    assert row["status"] == "ok" and row["metric"] == "SQuAD F1" and row["reported_on"] == "dev"
    assert row["value"] > 0.6 and row["value"] == row["dev_value"]
    assert {"exact match", "HasAns SQuAD F1", "NoAns SQuAD F1", "no-answer threshold"} <= set(row["other_metrics"])
    assert found is not None and len(found["statistics"]) == row["examples"]["test"] == 48
    write_predictions(tmp_path / "predictions", row["key"], found)
    official = json.loads((tmp_path / "predictions" / row["key"] / "predictions.json").read_text())
    assert list(official) == found["ids"] and list(official.values()) == found["predicted"]
    shutil.rmtree(tmp_path / "squad")  # both starts share what was encoded
    assert run_trial(replace(other, settings={**other.settings, "epochs": 1.0})).row["status"] == "ok"


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_zero_shot_tasks_read_their_official_files(
    family: str, request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model, data = (request.getfixturevalue(name) for name in (family, f"{family}_data"))
    if family == "bert":
        (tmp_path / "blimp").mkdir()
        pair = {"sentence_good": "the stone", "sentence_bad": "stone the the the garden", "field": "syntax"}
        line = json.dumps({**pair, "linguistics_term": "order", "UID": "stones"})
        (tmp_path / "blimp" / "stones.jsonl").write_text(f"{line}\n" * 3)
    else:
        (tmp_path / "lambada").mkdir()
        (tmp_path / "lambada" / "lambada_test.jsonl").write_text('{"text": "the river and the stone"}\n' * 2)
    task = {"bert": "blimp", "gpt2": "lambada"}[family]
    first, second = _rows(_config(task, tmp_path), _model_under_test(model, data, checkpoint))
    assert (first["init"], second["init"]) == ("pretrained", "random")
    assert (first["metric"], first["status"], first["kind"]) == ("accuracy", "ok", "zero-shot")
    assert 0 <= first["value"] <= 1 and first["dev_value"] is None


def test_the_perplexity_of_ones_own_text(
    gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    lines = [f"The {WORDS[i % 4]} of the captain.\n\nIt is {WORDS[i % 3]}." for i in range(6)]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    task = tmp_path / "letters.yaml"
    task.write_text("kind: perplexity\ntest: letters.jsonl\nfields: {text: body}\n")
    config = _config(str(task), tmp_path, seeds=[0, 1], lr=[1e-3, 2e-3], seq_len=16)
    evaluated = _model_under_test(gpt2, gpt2_data, checkpoint)
    rows = _rows(config, evaluated)
    assert [row["init"] for row in rows] == ["pretrained", "random"] and rows[0]["value"] != rows[1]["value"]
    row = rows[0]
    assert (row["task"], row["kind"], row["metric"], row["status"]) == ("letters", "zero-shot", "perplexity", "ok")
    assert row["hyperparameters"] == {"seq_len": 16} and row["examples"] == {"test": 6}
    assert row["other_metrics"]["words"] == sum(len(line.split()) for line in lines)
    assert {"perplexity per token", "perplexity per byte"} <= set(row["other_metrics"])
    _check_tasks(config, "bert")


def test_completions_of_a_causal_model(
    gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    triples = [
        ("the river", "near", "the stone"),
        ("the river", "near", "the garden"),
        ("a letter", "of", "the captain"),
    ]
    (tmp_path / "test.tsv").write_text("".join("\t".join(triple) + "\n" for triple in triples))
    (tmp_path / "train.tsv").write_text("the garden\tnear\tthe river\n")
    task = tmp_path / "near.yaml"
    task.write_text(
        "kind: completion\ntest: test.tsv\ntrain: train.tsv\nfields: {source: 1, relation: 2, target: 3}\nbeams: 2\n"
    )
    rows = _rows(_config(str(task), tmp_path), _model_under_test(gpt2, gpt2_data, checkpoint))
    assert [row["init"] for row in rows] == ["pretrained", "random"]
    for row in rows:
        assert (row["kind"], row["metric"], row["status"]) == ("completion", "perplexity", "ok")
        assert row["value"] > 1 and row["examples"] == {"test": 3} and row["other_metrics"]["sources"] == 2
        assert {"BLEU-2", "novel tuples", "novel objects", "novel unique objects"} <= row["other_metrics"].keys()
    with pytest.raises(UserError, match=r"near\.yaml needs a model that completes sources"):
        _check_tasks(_config(str(task), tmp_path), "bert")
    with pytest.raises(UserError, match="can only translate"):
        _check_tasks(_config(str(task), tmp_path), "ctc-encoder")


def test_bleu_without_sacrebleu_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pairs.tsv").write_text("the river\tel río\n")
    task = tmp_path / "news.yaml"
    task.write_text("kind: translation\ntest: pairs.tsv\n")
    _check_tasks(_config(str(task), tmp_path), "transformer")
    monkeypatch.setitem(sys.modules, "sacrebleu", None)  # as Python treats a package that is not there
    with pytest.raises(UserError, match=r"needs sacrebleu, which is not installed; pip install 'multihop\[transl"):
        _check_tasks(_config(str(task), tmp_path), "transformer")


def test_pairs_out_of_step_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.es").write_text("uno\n")
    (tmp_path / "news.yaml").write_text("kind: translation\ntest: [a.en, a.es]\n")
    with pytest.raises(UserError, match=r"a\.en has 2 lines and .*a\.es 1; line i of the one must translate"):
        _check_tasks(_config(str(tmp_path / "news.yaml"), tmp_path), "transformer")


def test_tasks_that_cannot_be_run_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text('{"text": "the river and the stone"}\n')
    with pytest.raises(UserError, match="task lambada needs a causal model"):
        _check_tasks(_config("lambada", tmp_path), "bert")
    with pytest.raises(UserError, match=r"task ptb reads .*ptb\.test\.txt, which is missing"):
        _check_tasks(_config("ptb", tmp_path), "gpt2")
    with pytest.raises(UserError, match=r"but eval\.checkpoint is a Hugging Face model"):
        _check_tasks(_config("heldout-perplexity", tmp_path, checkpoint="a"), "gpt2")


@pytest.fixture
def published(bert: ModelConfig, bert_data: Path, checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """The model of `checkpoint` as files of Hugging Face, with its tokenizer."""
    info, folder = open_dataset(bert_data).manifest.tokenizer, tmp_path / "published"
    export_model(checkpoint(bert, bert_data)[0], bert, info.vocab_size, info.special_ids, folder)
    export_tokenizer(bert_data / info.file, info, True, bert.max_positions, folder)
    return folder


def test_a_tokenizer_that_needs_more_than_its_file_is_refused(published: Path) -> None:
    (published / "sentencepiece.model").rename(published / "spiece.model")
    with pytest.raises(UserError, match="unigram kind; give the SentencePiece"):
        of_huggingface(published)
    (published / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="lower-cases texts"):
        of_huggingface(published)
    (published / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert of_huggingface(published).tokenizer_path.endswith("spiece.model")


@pytest.mark.usefixtures("bbc")
def test_a_hugging_face_model_is_evaluated_as_the_checkpoint_that_it_was_made_of(
    published: Path, bert: ModelConfig, bert_data: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = _config("bbc-topics", tmp_path, epochs=1, max_examples=64)
    theirs = of_huggingface(published)
    assert theirs.model.layers == 1 and theirs.checkpoint_step is None
    ours = _rows(config, _model_under_test(bert, bert_data, checkpoint))
    for row, other in zip(_rows(config, theirs), ours, strict=True):
        assert (row["value"], row["curve"]) == (other["value"], other["curve"])


def test_the_perplexity_of_a_model_without_its_output_layer_is_refused(published: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("The river of the captain is long.\n" * 5)
    task = tmp_path / "letters.yaml"
    task.write_text("kind: perplexity\ntest: letters.txt\n")
    config = _config(str(task), tmp_path, seq_len=16, inits=["pretrained"])
    [row] = _rows(config, of_huggingface(published))
    assert row["status"] == "ok" and row["other_metrics"]["pseudo-bits per byte"] > 0
    weights = load_file(published / "model.safetensors")
    without = {name: weight for name, weight in weights.items() if not name.startswith("cls.predictions")}
    assert len(without) < len(weights)
    save_file(without, published / "model.safetensors")
    with pytest.raises(UserError, match=r"published has no weights for predicting tokens, which task letters needs"):
        _rows(config, of_huggingface(published))


@pytest.mark.usefixtures("bbc")
def test_weights_that_changed_since_the_plan_are_refused(published: Path, tmp_path: Path) -> None:
    trial = _plan_trials(_config("bbc-topics", tmp_path), of_huggingface(published))[0]
    weights = published / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="is not the model that the trials were planned with"):
        run_trial(trial)


def test_a_model_without_its_tokenizer_is_refused(published: Path) -> None:
    for name in ("sentencepiece.model", "tokenizer.json"):
        (published / name).unlink()
    with pytest.raises(UserError, match=r"has no tokenizer; expected one of sentencepiece\.model, tokenizer\.json"):
        of_huggingface(published)


def test_without_a_labeled_test_set_half_of_the_development_set_is_reported(
    bert: ModelConfig, bert_data: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "glue" / "RTE"
    folder.mkdir(parents=True)
    for name, count in (("train", 40), ("dev", 30)):
        rows = [f"{i}\t{WORDS[i % 4]} {i}\tstone\t{'not_' * (i % 2)}entailment" for i in range(count)]
        (folder / f"{name}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")
    (folder / "test.tsv").write_text("index\tsentence1\tsentence2\n0\triver\tstone\n1\tstone\triver\n")
    evaluated = _model_under_test(bert, bert_data, checkpoint)
    half, whole = (
        run_trial(_plan_trials(_config("glue/rte", tmp_path, epochs=1, report_on=on), evaluated)[0])
        for on in ("half", "dev")
    )
    sizes = half.row["examples"]
    assert half.row["reported_on"] == "half of dev" and sizes["dev"] + sizes["test"] == 30 and 5 < sizes["test"] < 25
    assert whole.row["reported_on"] == "dev" and whole.row["examples"]["dev"] == whole.row["examples"]["test"] == 30
    assert half.predictions is not None
    assert half.predictions["files"]["RTE.tsv"].splitlines()[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in half.predictions["files"]["RTE.tsv"].splitlines()[1:]] == ["0", "1"]
