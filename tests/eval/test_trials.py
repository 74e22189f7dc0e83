"""A trial is planned, told from others, and run as plain data."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.rows import append_row, read_rows
from data_prep.shards import open_dataset
from eval.config import EvalConfig
from eval.trial import Trial, failed_row, plan_trials, run_trial, trial_key
from pretrain.config import ModelConfig

Checkpoint = Callable[[ModelConfig, Path], tuple[str, str]]

TRIAL = Trial(
    task="bbc-topics",
    task_fingerprint="t",
    init="pretrained",
    seed=0,
    checkpoint_dir="runs/a/checkpoints/step-00000007",
    checkpoint_sha256="c",
    checkpoint_step=7,
    model=ModelConfig(family="bert", layers=1, hidden=32, heads=2, intermediate=64, max_positions=64).model_dump(),
    data_path="runs/a/data",
    data_fingerprint="d",
    eval=EvalConfig().model_dump(),
    threads=1,
)


def _plan(config: EvalConfig, model: ModelConfig, checkpoint: tuple[str, str], data: Path) -> list[Trial]:
    return plan_trials(config, model, *checkpoint, 7, data, open_dataset(data).manifest.fingerprint)


def test_the_key_knows_everything_that_makes_the_result_and_nothing_else() -> None:
    same = [
        replace(TRIAL, checkpoint_dir="/elsewhere", data_path="/elsewhere", threads=4),
        replace(TRIAL, eval={**TRIAL.eval, "data_dir": "/elsewhere", "tasks": ["conll2003"], "seeds": [5]}),
        replace(TRIAL, model={**TRIAL.model, "preset": "bert-tiny"}),
        Trial(**json.loads(json.dumps(asdict(TRIAL)))),
    ]
    other = [
        replace(TRIAL, task="conll2003"),
        replace(TRIAL, task_fingerprint="u"),
        replace(TRIAL, seed=1),
        replace(TRIAL, init="random", checkpoint_sha256=None),
        replace(TRIAL, checkpoint_sha256="e"),
        replace(TRIAL, data_fingerprint="e"),
        replace(TRIAL, model={**TRIAL.model, "layers": 2}),
        *(
            replace(TRIAL, eval={**TRIAL.eval, name: value})
            for name, value in [
                ("epochs", 9.0), ("max_examples", 9), ("max_dev_examples", 9), ("batch_size", 9),
                ("lr", 9.0), ("seq_len", 9)
            ]
        ),
    ]  # fmt: skip
    assert {trial_key(trial) for trial in same} == {trial_key(TRIAL)}
    assert len({trial_key(trial) for trial in [TRIAL, *other]}) == len(other) + 1


def test_a_zero_shot_key_does_not_depend_on_how_others_are_fine_tuned() -> None:
    zero_shot = replace(TRIAL, task="heldout-perplexity")
    assert trial_key(zero_shot) == trial_key(replace(zero_shot, eval={**TRIAL.eval, "lr": 1.0, "epochs": 1.0}))
    assert trial_key(zero_shot) != trial_key(replace(zero_shot, eval={**TRIAL.eval, "seq_len": 9}))


@given(st.permutations(list(TRIAL.eval)))
def test_the_order_of_settings_is_nothing(order: list[str]) -> None:
    assert trial_key(replace(TRIAL, eval={name: TRIAL.eval[name] for name in order})) == trial_key(TRIAL)


@pytest.mark.usefixtures("bbc", "conll")
def test_the_plan_is_tasks_by_seeds_by_initial_weights(bert: ModelConfig, bert_data: Path, tmp_path: Path) -> None:
    config = EvalConfig(tasks=["bbc-topics", "conll2003"], seeds=[4, 5, 6])
    trials = _plan(config, bert, (str(tmp_path), "c"), bert_data)
    assert len(trials) == 12 == len({trial_key(trial) for trial in trials})
    assert {(t.task, t.seed, t.init) for t in trials} == {
        (task, seed, init) for task in config.tasks for seed in config.seeds for init in ("pretrained", "random")
    }
    for trial in trials:
        given_a_checkpoint = (trial.checkpoint_dir, trial.checkpoint_sha256, trial.checkpoint_step)
        assert given_a_checkpoint == ((str(tmp_path), "c", 7) if trial.init == "pretrained" else (None, None, None))


def test_random_trials_stay_the_same_under_another_checkpoint(bert: ModelConfig, bert_data: Path, bbc: Path) -> None:
    config = EvalConfig(tasks=["bbc-topics"])
    first, second = (_plan(config, bert, (str(bbc), sha), bert_data) for sha in ("c", "e"))
    unchanged = {trial_key(t) for t in first} & {trial_key(t) for t in second}
    assert unchanged == {trial_key(t) for t in first if t.init == "random"}


@pytest.mark.usefixtures("bbc")
def test_a_trial_gives_a_row_that_stands_in_the_file(
    bert: ModelConfig, bert_data: Path, quick: EvalConfig, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = quick.model_copy(update={"tasks": ["bbc-topics"], "max_examples": 120, "epochs": 8, "seeds": [0]})
    trials = _plan(config, bert, checkpoint(bert, bert_data), bert_data)
    rows = [run_trial(trial) for trial in trials]
    for trial, row in zip(trials, rows, strict=True):
        append_row(tmp_path / "results.jsonl", row)
        assert row["status"] == "ok" and row["key"] == trial_key(trial)
        assert (row["task"], row["kind"], row["metric"]) == ("bbc-topics", "classification", "accuracy")
        assert (row["seed"], row["init"], row["checkpoint_step"]) == (0, trial.init, trial.checkpoint_step)
        assert 0.5 < row["value"] <= 1 and 0.5 < row["dev_value"] <= 1
        assert row["examples"]["train"] == 120 and row["hyperparameters"]["lr"] == quick.lr
        assert row["seconds"] > 0
    assert read_rows(tmp_path / "results.jsonl") == rows
    again = run_trial(trials[0])
    assert {**again, "seconds": 0} == {**rows[0], "seconds": 0}


def test_weights_come_from_the_checkpoint(
    gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = EvalConfig(tasks=["heldout-perplexity"], seq_len=32)
    saved = checkpoint(gpt2, gpt2_data)
    pretrained, random = _plan(config, gpt2, saved, gpt2_data)
    # The "checkpoint" holds the random weights of seed 77.
    like_it = replace(random, seed=77)
    assert run_trial(pretrained)["value"] == run_trial(like_it)["value"] != run_trial(random)["value"]


def test_a_damaged_checkpoint_is_not_evaluated(gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint) -> None:
    folder, sha256 = checkpoint(gpt2, gpt2_data)
    pretrained, _ = _plan(EvalConfig(tasks=["heldout-perplexity"], seq_len=32), gpt2, (folder, sha256), gpt2_data)
    with pytest.raises(ValueError, match="is another checkpoint than the trials were planned with"):
        run_trial(replace(pretrained, checkpoint_sha256="another"))
    (file,) = Path(folder).glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 0x40]))
    with pytest.raises(ValueError, match="is damaged: its SHA-256 is not the manifest's"):
        run_trial(pretrained)


def test_perplexity_has_its_references_beside_it(gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint) -> None:
    config = EvalConfig(tasks=["heldout-perplexity"], seeds=[0, 1, 2], seq_len=32)
    trials = _plan(config, gpt2, checkpoint(gpt2, gpt2_data), gpt2_data)
    assert [trial.init for trial in trials] == ["pretrained", "random"]
    row = run_trial(trials[1])
    assert row["metric"] == "perplexity" and row["higher_is_better"] is False and row["dev_value"] is None
    others = row["other_metrics"]
    assert row["value"] == pytest.approx(math.exp(others["cross-entropy"]))
    pieces = open_dataset(gpt2_data).manifest.tokenizer.vocab_size
    assert others["unigram perplexity"] < others["uniform perplexity"] == pieces
    # Random weights predict next to nothing.
    assert pieces / 2 < row["value"] < 2 * pieces


@pytest.mark.usefixtures("bbc")
def test_a_trial_that_diverges_is_a_failed_row(bert: ModelConfig, bert_data: Path, tmp_path: Path) -> None:
    config = EvalConfig(tasks=["bbc-topics"], seeds=[0], lr=1e30, seq_len=16)
    trial = _plan(config, bert, (str(tmp_path), "c"), bert_data)[1]
    row = run_trial(trial)
    assert row["status"] == "failed" and row["value"] is None and row["key"] == trial_key(trial)
    assert "lower eval.lr" in row["error"]
    append_row(tmp_path / "results.jsonl", row)
    assert failed_row(trial, "its worker died", 1.0)["error"] == "its worker died"


@pytest.mark.usefixtures("bbc")
def test_other_data_or_files_than_planned_are_refused(bert: ModelConfig, bert_data: Path, tmp_path: Path) -> None:
    trial = _plan(EvalConfig(tasks=["bbc-topics"]), bert, (str(tmp_path), "c"), bert_data)[1]
    with pytest.raises(ValueError, match="is not that of the run"):
        run_trial(replace(trial, data_fingerprint="other"))
    with pytest.raises(ValueError, match="not those the trials were planned with"):
        run_trial(replace(trial, task_fingerprint="other"))
