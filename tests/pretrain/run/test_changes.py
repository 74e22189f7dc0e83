"""What may change in the recipe of a run that has begun."""

import json
from typing import Any

import pytest

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.run.changes import check_allowed, fill_recorded_part, locked_changes, recorded_part

RECIPE: dict[str, Any] = {
    "name": "some",
    "data": {"sources": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]},
    "model": {"preset": "bert-tiny"},
    "phases": [{"steps": 10}, {"steps": 20, "skip_steps": [12]}],
}


def changed(**changes: Any) -> dict[str, Any]:
    return TrainingConfig.model_validate({**RECIPE, **changes}).model_dump(mode="json")


def refused(allowed: list[str], **changes: Any) -> str:
    differences = locked_changes(changed(), changed(**changes), TrainingConfig)
    try:
        check_allowed(differences, TrainingConfig, allowed, "runs/some")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "changes",
    [
        {
            "engine": {
                "zero_stage": 3,
                "offload": "optimizer",
                "micro_batch_size": 1,
                "data_workers": 3,
                "compile": False,
            }
        },
        {"checkpoint": {"save_interval": 7, "keep": 1, "keep_every": 14}},
    ],
)
def test_what_is_rounding_only_changes_freely(changes: dict[str, Any]) -> None:
    assert not refused([], **changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 2}, "seed"),
        ({"optimizer": {"name": "lamb"}}, "optimizer.name"),
        ({"engine": {"precision": "bf16"}}, "engine.precision"),
        ({"checkpoint": {"location": "/elsewhere"}}, "checkpoint.location"),
        ({"name": "other"}, "name"),
        ({"phases": [{"steps": 10}, {"steps": 20, "skip_steps": [13]}]}, "phases[1].skip_steps"),
        ({"phases": [{"steps": 10, "lr": 1.0}, {"steps": 20, "skip_steps": [12]}]}, "phases[0].lr"),
        ({"model": {"preset": "bert-tiny", "dropout": 0.0}}, "model.dropout"),
    ],
)
def test_what_changes_the_run_has_to_be_allowed_by_name(changes: dict[str, Any], key: str) -> None:
    complaint = refused([], **changes)
    assert f"{key} was " in complaint and f"--allow-change '{key}'" in complaint
    assert not refused([key], **changes)
    section = key.split(".")[0].split("[")[0]
    assert not refused([section], **changes)
    assert refused(["tracking", key[:-1]], **changes)


@pytest.mark.parametrize("changes", [{"model": {"preset": "bert-mini"}}, {"model": {"preset": "gpt2"}}])
def test_another_model_is_another_run_whatever_is_allowed(changes: dict[str, Any]) -> None:
    complaint = refused(["name", "model"], **changes)
    assert "set name=… for a new run" in complaint and "--allow-change" not in complaint


def test_a_run_keeps_the_moments_of_its_optimizer_whatever_is_allowed() -> None:
    complaint = refused(["optimizer"], optimizer={"name": "muon"})
    assert 'optimizer.name was "adamw", is "muon"' in complaint
    assert "whose moments are others" in complaint and "model.init_from" in complaint


def test_a_checkpoint_remembers_weights_of_sources_and_not_their_paths() -> None:
    then = recorded_part(TrainingConfig.model_validate(RECIPE))
    sources = [{"path": "elsewhere", "weight": 1.0}, {"path": "b", "weight": 3.0}]
    now = recorded_part(TrainingConfig.model_validate({**RECIPE, "data": {"sources": sources}}))
    assert locked_changes(then, now, TrainingConfig) == [("data.sources[1].weight", 2.0, 3.0)]


def test_what_an_older_version_remembers_has_the_defaults_of_newer_keys() -> None:
    remembered = json.loads(json.dumps(recorded_part(TrainingConfig.model_validate(RECIPE))))
    now = recorded_part(TrainingConfig.model_validate(RECIPE))
    assert fill_recorded_part(remembered) == now
    del (
        remembered["optimizer"]["max_trust_ratio"],
        remembered["phases"][0]["batch_ramp"],
        remembered["model"]["init_from"],
    )
    assert fill_recorded_part(remembered) == now
