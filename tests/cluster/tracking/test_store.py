"""The choice of the store in which a run is tracked."""

from pathlib import Path

import pytest
from tracked_runs import RECIPE, client_of

from multihop.cluster.tracking.connection import store_uri
from multihop.cluster.tracking.tracker import open_run
from multihop.common.errors import UserError


def test_a_deleted_experiment_is_the_users_mistake(run_dir: Path) -> None:
    client = client_of(run_dir)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(UserError, match=r"tracking\.experiment=gone was deleted"):
        open_run(run_dir, RECIPE, None, "gone", {})


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
