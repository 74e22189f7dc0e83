"""The choice of the store in which a run is tracked."""

import json
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import RECIPE, client_of

from multihop.cluster.tracking.connection import store_uri
from multihop.cluster.tracking.store import CHANGED_TAG, log_params
from multihop.cluster.tracking.tracker import open_run
from multihop.common.errors import UserError


def test_a_deleted_experiment_is_the_users_mistake(run_dir: Path) -> None:
    client = client_of(run_dir)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(UserError, match=r"tracking\.experiment=gone was deleted"):
        open_run(run_dir, RECIPE, None, "gone", {})


def test_a_changed_parameter_is_in_a_tag_until_it_is_changed_back(run_dir: Path) -> None:
    client = client_of(run_dir)
    run_id = client.create_run(client.create_experiment("changes")).info.run_id

    def logged(**tree: Any) -> Any:
        log_params(client, run_id, tree)
        data = client.get_run(run_id).data
        assert data.params["lr"] == "0.1"
        return json.loads(data.tags[CHANGED_TAG]) if CHANGED_TAG in data.tags else None

    long = {f"key{number}": "x" * 2000 for number in range(4)}
    assert logged(lr=0.1, steps=[{"n": 5}], **dict.fromkeys(long, "y")) is None
    assert logged(lr=0.2, steps=[{"n": 5}]) == {"lr": "0.2"}
    assert logged(lr=0.1, steps=[{"n": 6}]) == {"steps.0.n": "6"}
    assert logged(lr=0.1, steps=[{"n": 5}]) == {}
    assert logged(lr=0.1, **long) == {"key0": "x" * 2000, "key1": "x" * 2000}  # as many as a tag can have


@pytest.mark.parametrize("uri", ["redis://here", "runs/mlruns", "localhost:5000", "ftp://user:hunter2@host"])
def test_an_impossible_store_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(UserError, match=r"tracking\.uri=") as failed:
        store_uri(tmp_path, uri)
    assert "hunter2" not in str(failed.value)


def test_the_store_is_the_recipes_or_the_environments_or_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://one:1")
    assert store_uri(tmp_path) == "http://one:1"
    assert store_uri(tmp_path, "http://two:2") == "http://two:2"
