"""Trials on Ray: each leaves its row, whatever happens to the others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.runs.trials import run_trials, trials_left
from common.json_lines import read_rows
from data_prep.dataset.shards import open_dataset
from eval.config import EvalConfig
from eval.evaluated import of_run
from eval.plan import plan_trials
from eval.trial import Trial, trial_key
from pretrain.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("two_cpus")


@pytest.fixture
def trials(bert_data: Path, tmp_path: Path) -> tuple[EvalConfig, list[Trial]]:
    """Trials of random weights on a task of one's own."""
    words = ("river", "stone", "letter", "garden")
    (tmp_path / "own.csv").write_text("what,how\n" + "".join(f"{words[i % 4]} {i},{i % 2}\n" for i in range(80)))
    (tmp_path / "own.yaml").write_text("kind: classification\ntrain: own.csv\nfields: {text: what, label: how}\n")
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "max_positions": 64}
    model = ModelConfig.model_validate({"family": "bert", **sizes})
    config = EvalConfig.model_validate(
        {"tasks": [str(tmp_path / "own.yaml")], "seeds": [0], "epochs": [1, 3], "lr": [1e-3, 1e30], "batch_size": 8}
    )
    evaluated = of_run(model, str(tmp_path), "c", 7, bert_data, open_dataset(bert_data).manifest)
    return config, [trial for trial in plan_trials(config, evaluated) if trial.init == "random"]


def test_a_trial_that_fails_is_told_and_does_not_stop_the_others(
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
    assert [trial_key(trial) for trial in trials_left([*planned, elsewhere], results)] == [trial_key(elsewhere)]
    assert max(trial.work for trial in planned) == planned[-1].work > planned[0].work
