"""Trials on Ray: each writes its row, whatever happens to the others."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from multihop.cluster.runs.evaluation import weights_dir
from multihop.cluster.runs.trials import FAILURES, run_missing_trials, run_trials
from multihop.common.json_lines import read_rows
from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.config import EvalConfig
from multihop.eval.model.model_under_test import of_run
from multihop.eval.tasks.known_tasks import open_tasks
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.plan_file import read_results
from multihop.eval.trials.start_from import next_wave
from multihop.eval.trials.trial import Trial, trial_key
from multihop.pretrain.models.families import parse_model_config

pytestmark = pytest.mark.usefixtures("two_cpus")


def _own(folder: Path, name: str) -> str:
    """Write a task of the user; returns the path of its YAML file."""
    words = ("river", "stone", "letter", "garden")
    (folder / f"{name}.csv").write_text("what,how\n" + "".join(f"{words[i % 4]} {i},{i % 2}\n" for i in range(80)))
    (folder / f"{name}.yaml").write_text(f"kind: classification\ntrain: {name}.csv\nfields: {{text: what, label: how}}")
    return str(folder / f"{name}.yaml")


def _random(config: EvalConfig, data: Path, results: Path, layers: int = 1) -> list[Trial]:
    """Return the trials with random weights."""
    sizes = {"layers": layers, "hidden": 32, "heads": 2, "max_positions": 64}
    model = parse_model_config({"family": "bert", **sizes})
    evaluated = of_run(model, str(results), "c", 7, data, open_dataset(data).manifest)
    return [t for t in plan_trials(config, open_tasks(config), evaluated, weights_dir(results)) if t.init == "random"]


@pytest.fixture
def trials(bert_data: Path, tmp_path: Path) -> tuple[EvalConfig, list[Trial]]:
    """Trials with random weights on a task of the user."""
    config = EvalConfig.model_validate(
        {"tasks": [_own(tmp_path, "own")], "seeds": [0], "epochs": [1, 3], "lr": [1e-3, 1e30], "batch_size": 8}
    )
    return config, _random(config, bert_data, tmp_path / "eval" / "results.jsonl")


def test_a_trial_that_fails_is_reported_and_does_not_stop_the_others(
    trials: tuple[EvalConfig, list[Trial]], tmp_path: Path
) -> None:
    config, planned = trials
    elsewhere = replace(planned[0], tokenizer_path=str(tmp_path / "gone"), tokenizer_sha256="x", seed=9)
    results, seen = tmp_path / "eval" / "results.jsonl", []
    run_trials([*planned, elsewhere], config, results, seen.append)
    rows = read_rows(results)
    assert rows == json.loads(json.dumps(seen)) and len(rows) == 5
    status = {(row["seed"], row["hyperparameters"]["lr"]): (row["status"], row.get("retry")) for row in rows}
    assert status == {(0, 1e-3): ("ok", None), (0, 1e30): ("failed", False), (9, 1e-3): ("failed", True)}
    for row in rows:
        path = results.parent / "predictions" / f"{row['key']}.json"
        assert path.exists() == (row["status"] == "ok")
        assert row["status"] == "ok" or row["error"]
    # One that diverged would diverge again; one whose machine lacked a file is tried again.
    left = next_wave([*planned, elsewhere], rows)
    assert [trial_key(trial) for trial in left.trials] == [trial_key(elsewhere)] and not left.failed
    assert not next_wave([*planned, elsewhere], rows, {trial_key(elsewhere)}).trials
    assert max(trial.work for trial in planned) == planned[-1].work > planned[0].work


def test_an_exception_in_a_trial_does_not_stop_the_others(
    trials: tuple[EvalConfig, list[Trial]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, planned = trials
    # Its embedding has four petabytes: torch raises a RuntimeError, as where a GPU has no room.
    too_large = replace(planned[0], vocab_size=2**45, seed=7)
    results = tmp_path / "eval" / "results.jsonl"
    assert run_missing_trials([too_large, planned[0]], config, results, lambda row: None) == 1
    status = {row["seed"]: row for row in read_rows(results)}
    assert status[0]["status"] == "ok"
    assert (status[7]["status"], status[7]["retry"]) == ("failed", True)
    assert status[7]["error"].startswith("RuntimeError: ") and "\n" not in status[7]["error"]
    log = (results.parent / FAILURES).read_text()
    assert status[7]["key"] in log and "Traceback" in log and status[0]["key"] not in log
    output = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 trials failed" in output and "seed 7" in output.partition("1 of 2 trials failed")[2]


def test_trials_that_start_from_others_run_after_them_and_nothing_is_done_twice(
    bert_data: Path, tmp_path: Path
) -> None:
    large, small = _own(tmp_path, "large"), _own(tmp_path, "small")
    config = EvalConfig.model_validate(
        {
            "tasks": [{"name": small, "start_from": large}, {"name": large, "lr": [1e-3, 1e30]}],
            "seeds": [0], "epochs": 1, "lr": 1e-3, "batch_size": 8,
        }
    )  # fmt: skip
    results = tmp_path / "eval" / "results.jsonl"
    planned = _random(config, bert_data, results)
    seen: list[str] = []

    def evaluate() -> list[str]:
        seen.clear()
        assert run_missing_trials(planned, config, results, lambda row: seen.append(row["task"])) == 0
        return seen

    assert evaluate() == ["large", "large", "small"]
    rows = read_rows(results)
    chosen = next(row for row in rows if row["task"] == "large" and row["status"] == "ok")
    assert rows[-1]["status"] == "ok" and rows[-1]["source_key"] == chosen["key"]
    assert not list(weights_dir(results).iterdir()), "weights that nothing will start from are removed"
    assert evaluate() == []
    # Its weights are gone, so what it starts from runs again, with the same result.
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert evaluate() == ["large", "small"]
    again = read_rows(results)
    timeless = [{**row, "seconds": 0} for row in (chosen, rows[-1], *again[-2:])]
    assert timeless[:2] == timeless[2:]


def test_edited_and_restored_files_fewer_seeds_and_another_model_report_their_own_rows(
    bert_data: Path, tmp_path: Path
) -> None:
    task, results = _own(tmp_path, "own"), tmp_path / "eval" / "results.jsonl"
    labels = tmp_path / "own.csv"

    def evaluate(layers: int = 1, seeds: Sequence[int] = (0, 1)) -> tuple[int, list[str]]:
        """Evaluate; returns how many trials were run, and the keys of the rows that count."""
        given = {"tasks": [task], "seeds": seeds, "epochs": 1, "lr": 1e-3, "batch_size": 8}
        config, seen = EvalConfig.model_validate(given), []
        assert run_missing_trials(_random(config, bert_data, results, layers), config, results, seen.append) == 0
        rows = read_results(tmp_path).rows
        assert [row["seed"] for row in rows] == list(seeds)
        assert all(row["status"] == "ok" for row in rows)
        return len(seen), [row["key"] for row in rows]

    ran, first = evaluate()
    official = labels.read_text()
    labels.write_text(official.replace(",1\n", ",2\n").replace(",0\n", ",1\n").replace(",2\n", ",0\n"))
    assert ran == evaluate()[0] == evaluate(layers=2)[0] == 2
    labels.write_text(official)
    assert evaluate() == (0, first)
    assert evaluate(seeds=[1]) == (0, first[1:])
    assert len(read_rows(results)) == 6, "nothing is lost"
