"""Run directories with made-up rows, tracked in a real store, and what MLflow then has of them."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from multihop.cluster.tracking.connection import connect, store_uri
from multihop.cluster.tracking.tracker import Tracker, open_run

RECIPE = {"name": "a", "phases": [{"seq_len": 64, "lr": 1e-3}], "model": {"layers": 2}, "long": "x" * 9000}
START = 1_700_000_000.0


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite store made by MLflow, once, because its migrations take seconds."""
    runs = tmp_path_factory.mktemp("store")
    connect(store_uri(runs))
    return runs / "mlflow.db"


@pytest.fixture
def run_dir(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    shutil.copy(empty_store, tmp_path / "runs" / "mlflow.db")
    return folder


def start(run_dir: Path, uri: str | None = None, **tags: str) -> Tracker:
    return open_run(run_dir, RECIPE, uri, "multihop", tags)


def client_of(run_dir: Path, uri: str | None = None) -> Any:
    return connect(store_uri(run_dir.parent, uri))


def append(run_dir: Path, *rows: dict[str, Any]) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def row(step: int, loss: float, time: float | None = None, **more: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, **more, "time": START + step if time is None else time}


def follow_once(tracker: Tracker) -> None:
    with tracker.follow_metrics():
        pass


def history(client: Any, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run_id, key)]


def wait_until_logged(client: Any, run_id: str, step: int) -> None:
    while step not in dict(history(client, run_id, "loss")):
        time.sleep(0.1)


def trial(key: str, seed: int = 0, status: str = "ok", value: float | None = 0.75, **other: Any) -> dict[str, Any]:
    return {
        "task": "topics",
        "kind": "classification",
        "metric": "accuracy",
        "value": value,
        "dev_value": value,
        "other_metrics": {"macro F1 (%)": 70.5},
        "seed": seed,
        "init": "random",
        "checkpoint_step": None,
        "hyperparameters": {"lr": 5e-5, "features": {"layers": [-2, -1], "head": "linear"}},
        "key": key,
        "status": status,
        "seconds": 12.5,
        **other,
    }


def trials_of(client: Any, run_id: str) -> dict[str, Any]:
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'")
    assert len({run.data.tags["multihop.trial_key"] for run in found}) == len(found)
    return {run.data.tags["multihop.trial_key"]: run for run in found}
