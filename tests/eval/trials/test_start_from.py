"""Tasks whose trials start from the fine-tuned weights of another task."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError
from multihop.common.json_lines import Row
from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.config import EvalConfig
from multihop.eval.model.model_under_test import of_run
from multihop.eval.tasks.known_tasks import TaskSource, load_task, open_tasks
from multihop.eval.trials.check import check_start_from
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.plan_file import make_plan
from multihop.eval.trials.run_trial import run_trial
from multihop.eval.trials.start_from import Wave, next_wave, remove_unneeded
from multihop.eval.trials.trial import Trial, failed_row, hyperparameters, trial_key, weights_file
from multihop.pretrain.models.config import ModelConfig

DONE = Wave([], [])
Plan = Callable[..., list[Trial]]


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    """Three small tasks of the user."""
    words = ("river", "stone", "letter", "garden")
    for number, name in enumerate(("large", "small", "other")):
        rows = "".join(f"{words[(i + number) % 4]} {i},{(i + number) % 2}\n" for i in range(60))
        (tmp_path / f"{name}.csv").write_text("what,how\n" + rows)
        described = f"kind: classification\ntrain: {name}.csv\nfields: {{text: what, label: how}}\n"
        (tmp_path / f"{name}.yaml").write_text(described)
    return [str(tmp_path / f"{name}.yaml") for name in ("large", "small", "other")]


@pytest.fixture
def section(tasks: list[str]) -> dict[str, Any]:
    """A section in which `small` starts from `large`, which has a grid of two."""
    large, small, other = tasks
    small_first: list[Any] = [{"name": small, "start_from": large}, {"name": large, "lr": [1e-3, 2e-3]}, other]
    return {"tasks": small_first, "seeds": [0, 1], "lr": [1e-3], "batch_size": 8, "epochs": 1}


@pytest.fixture
def plan(bert: ModelConfig, bert_data: Path, tmp_path: Path) -> Plan:
    """A function from a section of a recipe to its trials."""

    def make(section: dict[str, Any], model: ModelConfig = bert, data: Path = bert_data) -> list[Trial]:
        evaluated = of_run(model, str(tmp_path), "c", 7, data, open_dataset(data).manifest)
        config = EvalConfig.model_validate(section)
        return plan_trials(config, open_tasks(config), evaluated, tmp_path / "weights")

    return make


def outcome(trial: Trial, status: str = "ok", dev: float | None = None) -> Row:
    """Return a made-up row: the higher learning rate has the better development score, and its weights are kept."""
    if status != "ok":
        return failed_row(trial, "it broke", 1.0, retry=status == "retry")
    row = failed_row(trial, "", 1.0)
    kept = {}
    if trial.weights_dir is not None and trial.start_from is None:
        path = weights_file(trial.weights_dir, trial_key(trial))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        kept = {"weights_sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    score = hyperparameters(trial)["lr"] if dev is None else dev
    return {**row, "status": "ok", "error": "", "retry": False, "value": 0.5, "dev_value": score, **kept}


def names(trials: list[Trial]) -> set[str]:
    return {Path(trial.task).stem for trial in trials}


def test_others_run_first_then_each_start_and_seed_from_its_chosen_trial(section: dict[str, Any], plan: Plan) -> None:
    trials = plan(section)
    first = next_wave(trials, [])
    assert names(first.trials) == {"large", "other"} and len(first.trials) == 12 and not first.failed
    # Each initialization is judged by itself: the random one is better at the lower rate.
    rows = [outcome(t, dev=-hyperparameters(t)["lr"] if t.init == "random" else None) for t in first.trials]
    assert next_wave(trials, rows[:-1]).trials == first.trials[-1:]
    second = next_wave(trials, rows)
    by_key = {trial_key(t): t for t in first.trials}
    assert names(second.trials) == {"small"} and len(second.trials) == 4
    for trial in second.trials:
        source = by_key[str(trial.source_key)]
        assert (source.init, source.seed) == (trial.init, trial.seed)
        assert source.settings["lr"] == (2e-3 if trial.init == "pretrained" else 1e-3)
    rows += [outcome(t) for t in second.trials]
    assert next_wave(trials, rows) == DONE
    for row in rows[-4:]:
        assert row["start_from"] == "large" and row["source_key"] in by_key and "weights_sha256" not in row
    assert all("start_from" not in row for row in rows[:-4])


def test_the_key_covers_the_source_and_is_unchanged_without_one(section: dict[str, Any], plan: Plan) -> None:
    trials = plan(section)
    plain = plan({**section, "tasks": [item["name"] if isinstance(item, dict) else item for item in section["tasks"]]})
    assert {trial_key(t) for t in plain if "small" not in t.task} <= {trial_key(t) for t in trials if not t.start_from}
    small = {trial_key(t) for t in plain if "small" in t.task}
    rows = [outcome(t) for t in next_wave(trials, []).trials]
    other = [{**row, "dev_value": 1 - row["dev_value"]} for row in rows]
    first, second = ({trial_key(t) for t in next_wave(trials, result).trials} for result in (rows, other))
    assert len(small | first | second) == 12


def test_after_another_choice_the_report_has_no_rows_of_the_former_one(
    section: dict[str, Any], plan: Plan, tasks: list[str]
) -> None:
    trials, config = plan(section), EvalConfig.model_validate(section)

    def asked(trials: list[Trial], rows: list[Row]) -> list[Row]:
        keys = set(make_plan(trials, rows, config, None).trials)
        return [row for key, row in {row["key"]: row for row in rows}.items() if key in keys]

    rows = [outcome(t) for t in next_wave(trials, []).trials]
    rows += [outcome(t) for t in next_wave(trials, rows).trials]
    assert len(asked(trials, rows)) == 16
    # Trained again, the lower rate is better.
    rows += [outcome(t, dev=1.0) for t in trials if Path(t.task).stem == "large" and t.settings["lr"] == 1e-3]
    assert {row["task"] for row in asked(trials, rows)} == {"large", "other"}
    rows += [outcome(t) for t in next_wave(trials, rows).trials]
    result = asked(trials, rows)
    assert len(result) == 16 and len([row for row in result if row["task"] == "small"]) == 4
    without = plan(
        {**section, "tasks": [item["name"] if isinstance(item, dict) else item for item in section["tasks"]]}
    )
    assert {row["task"] for row in asked(without, rows)} == {"large", "other"}


def test_trials_whose_source_failed_fail_with_its_reason(section: dict[str, Any], plan: Plan) -> None:
    trials = plan(section)

    def status(trial: Trial) -> str:
        if Path(trial.task).stem == "other" or (trial.init == "pretrained" and trial.seed == 0):
            return "ok"
        return "retry" if trial.init == "random" else "failed"

    rows = [outcome(t, status(t)) for t in next_wave(trials, []).trials]
    tried = {row["key"] for row in rows}
    wave = next_wave(trials, rows, tried)
    assert [(t.init, t.seed) for t in wave.trials] == [("pretrained", 0)]
    failed = {(row["init"], row["seed"]): row for row in wave.failed}
    assert {at: row["retry"] for at, row in failed.items()} == {
        ("pretrained", 1): False, ("random", 0): True, ("random", 1): True
    }  # fmt: skip
    assert failed["random", 0]["error"] == "the trial of large that it starts from failed: it broke"
    rows += [*wave.failed, *map(outcome, wave.trials)]
    assert next_wave(trials, rows, tried | {row["key"] for row in wave.failed}) == DONE
    # A rerun tries the sources again, and what starts from them.
    again = next_wave(trials, rows)
    assert names(again.trials) == {"large"} and {t.init for t in again.trials} == {"random"}
    rows += map(outcome, again.trials)
    assert {(t.init, t.seed) for t in next_wave(trials, rows).trials} == {("random", 0), ("random", 1)}


def test_weights_are_kept_while_they_are_needed_and_made_again_if_they_are_lost(
    section: dict[str, Any], plan: Plan, tmp_path: Path
) -> None:
    trials, weights = plan(section), tmp_path / "weights"

    def kept(rows: list[Row]) -> set[str]:
        remove_unneeded(weights, trials, rows, ())
        return {path.stem for path in weights.iterdir()}

    rows = [outcome(t) for t in next_wave(trials, []).trials]
    (weights / "notes.safetensors").touch()
    assert len(kept(rows[1:])) == 9, "the choice is not made before all rows stand"
    second = next_wave(trials, rows).trials
    chosen = {str(t.source_key) for t in second}
    assert len(chosen) == 4 and kept(rows) == {*chosen, "notes"}
    lost = weights / f"{second[0].source_key}.safetensors"
    damaged = weights / f"{second[1].source_key}.safetensors"
    lost.unlink()
    damaged.write_bytes(b"x")
    missing = next_wave(trials, rows)
    assert {trial_key(t) for t in missing.trials} == {lost.stem, damaged.stem}
    assert next_wave(trials, rows, {lost.stem, damaged.stem}).trials == second, "once"
    rows += map(outcome, missing.trials)
    assert next_wave(trials, rows).trials == second
    assert kept([*rows, *(outcome(t) for t in second[1:])]) == {str(second[0].source_key), "notes"}
    rows += map(outcome, second)
    assert kept(rows) == {"notes"} and next_wave(trials, rows) == DONE


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([{"name": "a", "start_from": "a"}], "is the task itself"),
        ([{"name": "a", "start_from": "b"}, "c"], r"is not one of the other tasks \(c\)"),
        (["a", {"name": "b", "start_from": "a"}, {"name": "c", "start_from": "b"}], "starts from a itself"),
        ([{"name": "a", "start_from": "b"}, {"name": "b", "start_from": "a"}], "starts from a itself"),
        ([{"name": "a", "start_from": "blimp"}, "blimp"], "blimp trains nothing"),
        ([{"name": "lambada", "start_from": "a"}, "a"], "lambada trains nothing"),
    ],
)
def test_an_impossible_start_is_refused(items: list[Any], complaint: str) -> None:
    config = EvalConfig.model_validate({"tasks": items})
    tasks = [
        TaskSource(
            each.name, each.name not in ("blimp", "lambada"), False, False, False, partial(load_task, each.name, None)
        )
        for each in config.tasks
    ]
    with pytest.raises(UserError, match=complaint):
        check_start_from(config, tasks)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_trial_begins_with_the_encoder_of_its_source_and_a_head_of_its_own(
    family: str, section: dict[str, Any], plan: Plan, tasks: list[str], request: pytest.FixtureRequest
) -> None:
    model, data = (request.getfixturevalue(name) for name in (family, f"{family}_data"))
    large, small, _ = tasks

    def rows(start_from: str | None, rate: float) -> list[Row]:
        given = [{"name": large, "lr": rate}, {"name": small, "start_from": start_from}]
        trials = [t for t in plan({**section, "tasks": given, "seeds": [0]}, model, data) if t.init == "random"]
        result: list[Row] = []
        while (wave := next_wave(trials, result)) != DONE:
            result += [run_trial(trial).row for trial in wave.trials]
        return [row for row in result if row["task"] == "small"]

    [plain], [unchanged], [changed] = rows(None, 1e-3), rows(large, 1e-30), rows(large, 1e-3)
    # A source that learned nothing leaves the encoder as it was.
    assert unchanged["curve"] == plain["curve"] != changed["curve"]
    assert unchanged["key"] != plain["key"]


def test_weights_that_are_not_those_of_the_row_are_refused(section: dict[str, Any], plan: Plan) -> None:
    trials = plan(section)
    rows = [outcome(t) for t in next_wave(trials, []).trials]
    trial = next(t for t in next_wave(trials, rows).trials if t.init == "random")
    path = weights_file(str(trial.weights_dir), str(trial.source_key))
    path.write_bytes(b"not these")
    with pytest.raises(UserError, match="the weights of large that the trial starts from, is damaged; rerun"):
        run_trial(trial)
    path.unlink()
    with pytest.raises(UserError, match="is missing; rerun"):
        run_trial(trial)
