"""ULMFiT's three stages: general text, target text with the same vocabulary, a classifier from those weights, also
averaged with one that reads backward."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import run_worker
from rank_pool import RankPool
from worker_runs import checkpoint, recipe

from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.config import EvalConfig
from multihop.eval.model.model_under_test import of_parent, of_path, of_run
from multihop.eval.tasks.known_tasks import open_tasks
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.run_trial import run_trial
from multihop.eval.trials.trial import Trial, trial_key
from multihop.pretrain.checkpoint.manifest import read_checkpoint_manifest
from multihop.pretrain.models.families import parse_model_config

MODEL = {"family": "awd-lstm", "layers": 2, "hidden": 32, "embedding": 16, "max_positions": 64}


def _run(folder: Path, data: Path, ranks: RankPool, family: str = "awd-lstm", **changes: Any) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "data").symlink_to(data)
    model = {**MODEL, "family": family}
    content = recipe(model=model, objective__name="clm", engine__data_workers=0, phases__0__lr=0.01, **changes)
    (folder / "recipe.json").write_text(json.dumps(content))
    assert ranks.run(run_worker, folder) == [0]
    return folder


@pytest.mark.ranks
@pytest.mark.usefixtures("bbc")
def test_from_general_text_by_target_text_to_a_classifier(
    gpt2_data: Path, tmp_path: Path, pool: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    general = _run(tmp_path / "general", gpt2_data, pool(1))
    target = _run(tmp_path / "target", gpt2_data, pool(1), model__init_from=str(general))
    rows = {run: [json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (general, target)}
    held = {run: [row["heldout_loss"] for row in rows[run] if "heldout_loss" in row] for run in rows}
    assert held[general][-1] < held[general][0]
    assert held[target][0] == pytest.approx(held[general][-1], rel=1e-6) and held[target][-1] < held[target][0]

    first, last = (read_checkpoint_manifest(checkpoint(run)) for run in (general, target))
    assert last.parent == first.content_hash()
    model = parse_model_config({**MODEL, "init_from": str(general)})
    evaluated = of_run(model, checkpoint(target), last.content_hash(), 8, gpt2_data, open_dataset(gpt2_data).manifest)
    settings = {
        "epochs": 4,
        "lr": 0.01,
        "batch_size": 8,
        "max_examples": 48,
        "seq_len": 24,
        "pooling": "concat",
        "schedule": "slanted_triangular",
        "layer_lr_decay": 0.385,
        "gradual_unfreezing": True,
        "dropout": 0.4,
    }
    config = EvalConfig.model_validate(
        {"tasks": ["bbc-topics"], "seeds": [0], "inits": ["pretrained", "parent", "random"], **settings}
    )
    parent = of_parent(evaluated, model, last.parent)
    results = [run_trial(trial).row for trial in plan_trials(config, open_tasks(config), evaluated, parent=parent)]
    assert [row["status"] for row in results] == ["ok"] * 3
    assert len({row["key"] for row in results}) == 3
    for row in results:
        assert {key: row["hyperparameters"][key] for key in settings} == settings
        assert len(row["curve"]["dev"]) == 4
    assert len({row["curve"]["loss"][0][1] for row in results}) == 3  # each has weights of its own

    backward = of_path(str(_run(tmp_path / "backward", gpt2_data, pool(1), "awd-lstm-backward")))
    assert backward.checkpoint_step == 8
    monkeypatch.chdir(tmp_path)  # workers start in another directory
    assert of_path("backward") == of_path("backward/checkpoints") == backward
    trials = plan_trials(config, open_tasks(config), evaluated, parent=parent, average_with=backward)
    averaged = [run_trial(trial) for trial in (Trial(**json.loads(json.dumps(asdict(trial)))) for trial in trials)]
    for alone, both in zip(results, averaged, strict=True):
        assert both.row["status"] == "ok" and both.row["key"] != alone["key"]
        assert both.row["curve"] == alone["curve"]  # of the run's own model
        expected = None if alone["init"] == "random" else backward.checkpoint_sha256
        assert both.row["average_with_sha256"] == expected
    # The other model has a seed of its own, or two models of one kind would be one where both weights are random.
    assert all(trial.average_with["seed"] != trial.seed for trial in trials)
    moved = replace(trials[0], average_with={**trials[0].average_with, "checkpoint_dir": "elsewhere"})
    assert trial_key(moved) == trial_key(trials[0])
    other = replace(trials[0], average_with={**trials[0].average_with, "checkpoint_sha256": "0" * 64})
    assert trial_key(other) != trial_key(trials[0])
