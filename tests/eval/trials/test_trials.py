"""A trial is planned, identified and run as plain data."""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.common.files import sha256_json
from multihop.common.json_lines import Row, append_row, read_rows
from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.config import EvalConfig, TaskConfig, TrialSettings, settings_of
from multihop.eval.model.model_under_test import ModelUnderTest, of_parent, of_run
from multihop.eval.tasks.known_tasks import load_task, open_tasks
from multihop.eval.tasks.task import Task
from multihop.eval.trials import trial as trial_module
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.run_trial import run_trial
from multihop.eval.trials.trial import Trial, failed_row, trial_key
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import parse_model_config

Checkpoint = Callable[[ModelConfig, Path], tuple[str, str]]

TRIAL = Trial(
    task="bbc-topics",
    task_fingerprint="t",
    kind="classification",
    described={},
    init="pretrained",
    seed=0,
    settings=TrialSettings().model_dump(),
    checkpoint_dir="runs/a/checkpoints/step-00000007",
    checkpoint_sha256="c",
    checkpoint_step=7,
    model=parse_model_config(
        {"family": "bert", "layers": 1, "hidden": 32, "heads": 2, "intermediate": 64, "max_positions": 64}
    ).model_dump(),
    vocab_size=100,
    tokenizer_path="runs/a/data/tokenizer.model",
    tokenizer_sha256="k",
    data_path="runs/a/data",
    data_fingerprint="d",
    task_dir=None,
    threads=1,
    work=1.0,
)


def _tasks(*names: str) -> list[TaskConfig]:
    return [TaskConfig(name=name) for name in names]


def _model_under_test(model: ModelConfig, checkpoint: tuple[str, str], data: Path) -> ModelUnderTest:
    return of_run(model, *checkpoint, 7, data, open_dataset(data).manifest)


def _plan(config: EvalConfig, model: ModelConfig, checkpoint: tuple[str, str], data: Path) -> list[Trial]:
    return plan_trials(config, open_tasks(config), _model_under_test(model, checkpoint, data))


def test_the_key_knows_everything_that_makes_the_result_and_nothing_else() -> None:
    same = [
        replace(TRIAL, checkpoint_dir="/elsewhere", data_path="/elsewhere", tokenizer_path="/elsewhere", threads=4),
        replace(TRIAL, task_dir="/elsewhere", work=2.0, data_fingerprint="e"),
        replace(TRIAL, model={**TRIAL.model, "preset": "bert-tiny"}, described={"notes": "n"}),
        Trial(**json.loads(json.dumps(asdict(TRIAL)))),
    ]
    others: dict[str, Any] = {"epochs": 9.0, "lr": 9.0, "warmup_ratio": 0.5, "weight_decay": 0.5, "report_on": "dev"}
    others |= {"dropout": 0.5, "head_dropout": 0.5}
    others |= dict.fromkeys(("max_examples", "max_dev_examples", "batch_size", "seq_len", "stride"), 9)
    others |= {"document_context": True, "features": {"layers": [-1]}, "pooling": "mean"}
    others |= {"schedule": "slanted_triangular", "layer_lr_decay": 0.5, "gradual_unfreezing": True}
    assert set(others) == set(TrialSettings.model_fields)
    other = [
        replace(TRIAL, task_fingerprint="u"),
        replace(TRIAL, seed=1),
        replace(TRIAL, init="random", checkpoint_sha256=None),
        replace(TRIAL, checkpoint_sha256="e"),
        replace(TRIAL, tokenizer_sha256="e"),
        replace(TRIAL, vocab_size=104),
        replace(TRIAL, model={**TRIAL.model, "layers": 2}),
        *(replace(TRIAL, settings={**TRIAL.settings, name: value}) for name, value in others.items()),
    ]
    frozen = [{"layers": [-1], "head": "linear"}, {"layers": [-2]}, {"layers": [-1], "combine": "sum"}]
    other += [replace(TRIAL, settings={**TRIAL.settings, "features": features}) for features in frozen]
    assert {trial_key(trial) for trial in same} == {trial_key(TRIAL)}
    assert len({trial_key(trial) for trial in [TRIAL, *other]}) == len(other) + 1


def test_a_zero_shot_key_knows_the_data_and_not_how_others_are_fine_tuned() -> None:
    zero_shot = replace(TRIAL, task="heldout-perplexity", kind="zero-shot")
    settings = TRIAL.settings
    assert trial_key(zero_shot) == trial_key(replace(zero_shot, settings={**settings, "lr": 1.0, "epochs": 1.0}))
    assert trial_key(zero_shot) != trial_key(replace(zero_shot, settings={**settings, "seq_len": 9}))
    assert trial_key(zero_shot) != trial_key(replace(zero_shot, data_fingerprint="e"))


@given(st.permutations(list(TRIAL.settings)))
def test_the_order_of_settings_is_nothing(order: list[str]) -> None:
    assert trial_key(replace(TRIAL, settings={name: TRIAL.settings[name] for name in order})) == trial_key(TRIAL)


def test_a_grid_is_all_combinations_and_a_tasks_own_values_come_before_those_of_all() -> None:
    config = EvalConfig.model_validate(
        {"tasks": ["a", {"name": "b", "lr": [1e-5, 2e-5], "epochs": 2}], "lr": 3e-5, "batch_size": [16, 32]}
    )
    plain, own = (settings_of(config, task) for task in config.tasks)
    assert [(s.lr, s.batch_size, s.epochs) for s in plain] == [(3e-5, 16, 3.0), (3e-5, 32, 3.0)]
    assert {(s.lr, s.batch_size, s.epochs) for s in own} == {(lr, n, 2.0) for lr in (1e-5, 2e-5) for n in (16, 32)}
    assert settings_of(EvalConfig(), config.tasks[0]) == [TrialSettings()]


@pytest.mark.parametrize(
    "content",
    [
        {"lr": []},
        {"lr": [1e-4, -1.0]},
        {"tasks": [{"name": "a", "lrs": 1.0}]},
        {"tasks": ["a", "a"]},
        {"seeds": [1, 1]},
    ],
)
def test_an_impossible_grid_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EvalConfig.model_validate(content)


@pytest.mark.usefixtures("bbc", "conll")
def test_the_plan_is_tasks_by_seeds_by_initial_weights(bert: ModelConfig, bert_data: Path, tmp_path: Path) -> None:
    config = EvalConfig(tasks=_tasks("bbc-topics", "conll2003"), seeds=[4, 5, 6])
    trials = _plan(config, bert, (str(tmp_path), "c"), bert_data)
    assert len(trials) == 12 == len({trial_key(trial) for trial in trials})
    assert {(t.task, t.seed, t.init) for t in trials} == {
        (task.name, seed, init) for task in config.tasks for seed in config.seeds for init in ("pretrained", "random")
    }
    for trial in trials:
        given_a_checkpoint = (trial.checkpoint_dir, trial.checkpoint_sha256, trial.checkpoint_step)
        assert given_a_checkpoint == ((str(tmp_path), "c", 7) if trial.init == "pretrained" else (None, None, None))


def test_more_settings_and_seeds_read_no_examples_and_validate_no_section_again(
    bert: ModelConfig, bert_data: Path, bbc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(Task, "reported")
    count(trial_module, "select_by_effect")

    def calls_of(rates: int, seeds: int) -> Counter[str]:
        calls.clear()
        content = {"tasks": ["bbc-topics"], "lr": [(1 + i) / 12345 for i in range(rates)], "seeds": range(seeds)}
        trials = _plan(EvalConfig.model_validate(content), bert, (str(bbc), "c"), bert_data)
        assert len({trial_key(trial) for trial in trials}) == 2 * rates * seeds
        return Counter(calls)

    first = calls_of(2, 2)
    assert first["reported"] > 0
    more = calls_of(20, 30)
    assert more["reported"] == first["reported"], "the examples of a task are counted and hashed once"
    assert 18 <= more["select_by_effect"] <= 20, "once for each new setting, whatever the seeds"


def test_random_trials_stay_the_same_under_another_checkpoint(bert: ModelConfig, bert_data: Path, bbc: Path) -> None:
    config = EvalConfig(tasks=_tasks("bbc-topics"))
    first, second = (_plan(config, bert, (str(bbc), sha), bert_data) for sha in ("c", "e"))
    unchanged = {trial_key(t) for t in first} & {trial_key(t) for t in second}
    assert unchanged == {trial_key(t) for t in first if t.init == "random"}


@pytest.mark.usefixtures("bbc")
def test_a_trial_gives_a_row_in_the_file(
    bert: ModelConfig, bert_data: Path, quick: TrialSettings, checkpoint: Checkpoint, tmp_path: Path, cache: Path
) -> None:
    settings = quick.model_dump() | {"max_examples": 120, "epochs": 8}
    config = EvalConfig.model_validate({**settings, "tasks": ["bbc-topics"], "seeds": [0]})
    trials = _plan(config, bert, checkpoint(bert, bert_data), bert_data)
    outcomes = [run_trial(trial) for trial in trials]
    assert len(list((cache / "multihop" / "inputs").glob("[!.]*"))) == 1  # both starts share it
    rows = [outcome.row for outcome in outcomes]
    for outcome in outcomes:
        result = outcome.predictions
        assert (
            result is not None and len(result["predicted"]) == len(result["targets"]) == outcome.row["examples"]["test"]
        )
        right = [one == other for one, other in zip(result["predicted"], result["targets"], strict=True)]
        assert outcome.row["value"] == pytest.approx(sum(right) / len(right))
        assert all(error["target"] != error["predicted"] for error in result["errors"])
        assert json.loads(json.dumps(result)) == result
    for trial, row in zip(trials, rows, strict=True):
        append_row(tmp_path / "results.jsonl", row)
        assert row["status"] == "ok" and row["key"] == trial_key(trial)
        assert (row["task"], row["kind"], row["metric"]) == ("bbc-topics", "classification", "accuracy")
        assert (row["seed"], row["init"], row["checkpoint_step"]) == (0, trial.init, trial.checkpoint_step)
        assert 0.5 < row["value"] <= 1 and 0.5 < row["dev_value"] <= 1
        assert row["examples"]["train"] == 120 and row["hyperparameters"]["lr"] == quick.lr
        assert row["seconds"] > 0
    assert read_rows(tmp_path / "results.jsonl") == json.loads(json.dumps(rows))
    again = run_trial(trials[0]).row
    assert {**again, "seconds": 0} == {**rows[0], "seconds": 0}


def test_weights_come_from_the_checkpoint(
    gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = EvalConfig(tasks=_tasks("heldout-perplexity"), seq_len=32)
    saved = checkpoint(gpt2, gpt2_data)
    pretrained, random = _plan(config, gpt2, saved, gpt2_data)
    # The "checkpoint" holds the random weights of seed 77.
    like_it = replace(random, seed=77)
    assert run_trial(pretrained).row["value"] == run_trial(like_it).row["value"] != run_trial(random).row["value"]


@pytest.mark.usefixtures("bbc")
def test_trials_of_the_parent_start_from_its_weights(
    bert: ModelConfig, bert_data: Path, checkpoint: Checkpoint, quick: TrialSettings, tmp_path: Path
) -> None:
    section = {"tasks": ["bbc-topics"], "seeds": [0], "inits": ["pretrained", "parent"], "max_examples": 40}
    config = EvalConfig.model_validate({**section, "epochs": 1, "lr": quick.lr, "seq_len": 16})
    folder, sha256 = checkpoint(bert, bert_data)
    parent = _model_under_test(bert, (folder, sha256), bert_data)
    evaluated = replace(parent, checkpoint_dir=str(tmp_path / "none"), checkpoint_sha256="x", checkpoint_step=20)
    ours, theirs = plan_trials(config, open_tasks(config), evaluated, parent=parent)
    assert (ours.init, theirs.init) == ("pretrained", "parent") and trial_key(ours) != trial_key(theirs)
    same = replace(ours, checkpoint_dir=folder, checkpoint_sha256=sha256, checkpoint_step=7)
    row, like_it = run_trial(theirs).row, run_trial(same).row
    assert (row["init"], row["checkpoint_sha256"], row["checkpoint_step"]) == ("parent", sha256, 7)
    assert row["curve"] == like_it["curve"] and row["value"] == like_it["value"]


@pytest.mark.usefixtures("bbc")
def test_the_parent_keeps_the_rotary_base_that_a_phase_changed(bert_data: Path, checkpoint: Checkpoint) -> None:
    sizes = {"family": "modernbert", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64}
    before, after = (parse_model_config({**sizes, "global_rope_theta": theta}) for theta in (1e4, 1e6))
    evaluated = _model_under_test(after, checkpoint(after, bert_data), bert_data)
    folder, sha256 = evaluated.checkpoint_dir, evaluated.checkpoint_sha256
    parent = of_parent(evaluated, before.model_copy(update={"init_from": folder}), sha256)
    config = EvalConfig.model_validate(
        {"tasks": ["bbc-topics"], "seeds": [0], "inits": ["pretrained", "parent", "random"]}
    )
    trials = plan_trials(config, open_tasks(config), evaluated, parent=parent)
    assert [trial.model["global_rope_theta"] for trial in trials] == [1e6, 1e4, 1e6]


def test_a_row_has_the_length_that_was_used_and_the_fingerprints_of_its_inputs(
    gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint
) -> None:
    saved = checkpoint(gpt2, gpt2_data)
    short, long = (
        _plan(EvalConfig(tasks=_tasks("heldout-perplexity"), seq_len=length), gpt2, saved, gpt2_data)[0]
        for length in (gpt2.max_positions, 4096)
    )
    assert trial_key(short) == trial_key(long)
    row, failed = run_trial(long).row, failed_row(long, "it broke", 1.0)
    data = open_dataset(gpt2_data).manifest
    assert row["hyperparameters"]["seq_len"] == gpt2.max_positions
    fingerprints = {
        "checkpoint_sha256": saved[1], "tokenizer_sha256": data.tokenizer.sha256,
        "task_fingerprint": long.task_fingerprint,
        "test_fingerprint": sha256_json([shard.sha256 for shard in data.of_split("heldout")]),
    }  # fmt: skip
    for each in (row, failed):
        assert {name: each[name] for name in fingerprints} == fingerprints


def test_the_fingerprint_of_a_test_set_is_that_of_its_examples_and_labels_alone(tmp_path: Path) -> None:
    def fingerprint(test: Sequence[str], train: str = "river,good", report_on: Literal["half", "dev"] = "half") -> str:
        for name, rows in (("train", [train, "stone,bad"]), ("test", test)):
            (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        files = "train: train.csv\ndev: test.csv\ntest: test.csv\n"
        (tmp_path / "own.yaml").write_text(f"kind: classification\n{files}fields: {{text: text, label: label}}\n")
        return load_task(str(tmp_path / "own.yaml"), None).test_fingerprint(report_on)

    first = fingerprint(["one,good", "two,bad"])
    assert first == fingerprint(["one,good", "two,bad"], "another,good", "dev")
    others = [["one,good", "two,good"], ["two,bad", "one,good"], ["one,good"], ["one,good", "three,bad"]]
    assert len({first, *map(fingerprint, others)}) == 5


def test_a_damaged_checkpoint_is_not_evaluated(gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint) -> None:
    folder, sha256 = checkpoint(gpt2, gpt2_data)
    pretrained, _ = _plan(EvalConfig(tasks=_tasks("heldout-perplexity"), seq_len=32), gpt2, (folder, sha256), gpt2_data)
    with pytest.raises(UserError, match="is not the checkpoint that the trials were planned with"):
        run_trial(replace(pretrained, checkpoint_sha256="another"))
    (file,) = Path(folder).glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 0x40]))
    with pytest.raises(UserError, match="is damaged: its SHA-256 is not the manifest's"):
        run_trial(pretrained)


def test_perplexity_has_its_references_beside_it(gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint) -> None:
    config = EvalConfig(tasks=_tasks("heldout-perplexity"), seeds=[0, 1, 2], seq_len=32)
    trials = _plan(config, gpt2, checkpoint(gpt2, gpt2_data), gpt2_data)
    assert [trial.init for trial in trials] == ["pretrained", "random"]
    row = run_trial(trials[1]).row
    assert row["metric"] == "perplexity" and row["higher_is_better"] is False and row["dev_value"] is None
    others = row["other_metrics"]
    assert row["value"] == pytest.approx(math.exp(others["cross-entropy"]))
    pieces = open_dataset(gpt2_data).manifest.tokenizer.vocab_size
    assert others["unigram perplexity"] < others["uniform perplexity"] == pieces
    # Random weights predict next to nothing.
    assert pieces / 2 < row["value"] < 2 * pieces


def test_held_out_text_with_a_flipped_bit_is_not_evaluated(
    gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(gpt2_data, tmp_path / "data"))
    trial = _plan(EvalConfig(tasks=_tasks("heldout-perplexity"), seq_len=32), gpt2, checkpoint(gpt2, data), data)[0]
    [shard] = open_dataset(data).manifest.of_split("heldout")
    path, before = data / shard.file, (data / shard.file).stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"SHA-256 is not the manifest.s; run `multihop prep --verify`"):
        run_trial(trial)


@pytest.mark.usefixtures("bbc")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_text_may_be_represented_by_all_of_its_tokens(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model, data = request.getfixturevalue(family), request.getfixturevalue(f"{family}_data")

    def row(**settings: Any) -> Row:
        shared = {"tasks": ["bbc-topics"], "epochs": 1, "seq_len": 16, "max_examples": 32, "batch_size": 8}
        config = EvalConfig.model_validate({**shared, **settings})
        return run_trial(_plan(config, model, (str(tmp_path), "c"), data)[1]).row

    poolings: list[Any] = ["family", "mean", "max", {"hops": 1}, {"hops": 3}]
    losses = [row(pooling=pooling)["curve"]["loss"][-1][1] for pooling in poolings]
    assert len(set(losses)) == len(poolings)
    assert max(losses) - min(losses) < 0.5  # a new head knows nothing of any


@pytest.mark.usefixtures("bbc")
def test_dropout_is_that_of_fine_tuning(bert: ModelConfig, bert_data: Path, tmp_path: Path) -> None:
    def losses(model_dropout: float, **settings: float) -> list[Any]:
        config = EvalConfig.model_validate(
            {"tasks": ["bbc-topics"], "epochs": 1, "seq_len": 16, "max_examples": 32, "batch_size": 8, **settings}
        )
        model = bert.model_copy(update={"dropout": model_dropout})
        return list(run_trial(_plan(config, model, (str(tmp_path), "c"), bert_data)[1]).row["curve"]["loss"])

    assert losses(0.4) == losses(0.1, dropout=0.4) == losses(0.0, dropout=0.4, head_dropout=0.4)
    without = losses(0.4, dropout=0.0)
    assert without == losses(0.0) == losses(0.0, head_dropout=0.0)
    assert len({str(each) for each in (losses(0.4), without, losses(0.0, head_dropout=0.4))}) == 3


@pytest.mark.usefixtures("bbc")
def test_a_trial_that_diverges_is_a_failed_row(bert: ModelConfig, bert_data: Path, tmp_path: Path) -> None:
    config = EvalConfig(tasks=_tasks("bbc-topics"), seeds=[0], lr=[1e30], seq_len=16)
    trial = _plan(config, bert, (str(tmp_path), "c"), bert_data)[1]
    row = run_trial(trial).row
    assert row["status"] == "failed" and row["value"] is None and row["key"] == trial_key(trial)
    assert "lower eval.lr" in row["error"]
    append_row(tmp_path / "results.jsonl", row)
    assert failed_row(trial, "its worker died", 1.0)["error"] == "its worker died"


@pytest.mark.usefixtures("bbc")
def test_other_data_or_files_than_planned_are_refused(bert: ModelConfig, bert_data: Path, tmp_path: Path) -> None:
    trial = _plan(EvalConfig(tasks=_tasks("bbc-topics")), bert, (str(tmp_path), "c"), bert_data)[1]
    with pytest.raises(UserError, match="is not the tokenizer that the trials were planned with"):
        run_trial(replace(trial, tokenizer_sha256="other"))
    with pytest.raises(UserError, match="differ from those that the trials were planned with"):
        run_trial(replace(trial, task_fingerprint="other"))
