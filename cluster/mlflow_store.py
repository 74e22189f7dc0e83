"""MLflow's store, spoken to in steps that may be repeated: a crash between any two of them leaves no duplicates."""

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from data_prep.shown import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

STORE_FILES = ("mlflow.db", "mlartifacts")
"""What the names of the local store's files in the folder of the runs begin with, locks and journals included."""
TOKEN_TAG, TRIAL_TAG, PARENT_TAG = "multihop.token", "multihop.trial_key", "mlflow.parentRunId"
_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")
_KEY_LENGTH, _VALUE_LENGTH = 250, 6000  # MLflow's limits (mlflow.utils.validation)
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100
# Our callers go on without MLflow and try again later, so it should say soon that it is away.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}


def store_uri(runs: Path, given: str | None = None) -> str:
    """Where MLflow keeps its records: `given`, else MLFLOW_TRACKING_URI, else an SQLite file in the folder of the runs.

    Raises:
        ValueError: no store that MLflow knows.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs.resolve() / 'mlflow.db'}"
    if urlsplit(uri).scheme.partition("+")[0] not in _SCHEMES and uri != "databricks":
        raise ValueError(
            f"tracking.uri={redacted(uri)} is not a tracking server or database; write http://HOST:PORT or "
            "sqlite:///PATH, or leave it out for SQLite in the folder of the runs"
        )
    return uri


def connect(uri: str) -> "MlflowClient":
    """A client of the store. An SQLite store that is not there is made first; that takes MLflow some seconds."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    database = _sqlite_path(uri)
    if database is not None:
        _create_sqlite(database)
    return MlflowClient(tracking_uri=uri)


def experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    """The experiment of this name, made when it is not there.

    Raises:
        ValueError: it was deleted in MLflow.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        database = _sqlite_path(uri)
        artifacts = (database.parent / "mlartifacts").as_uri() if database is not None else None
        kind = {"mlflow.experimentKind": "custom_model_development"}  # which of its pages MLflow shows first
        return str(client.create_experiment(name, artifact_location=artifacts, tags=kind))
    if found.lifecycle_stage != "active":
        raise ValueError(
            f"tracking.experiment={name} was deleted in MLflow; bring it back with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}`, or choose another name"
        )
    return str(found.experiment_id)


def search(client: "MlflowClient", experiment: str, tag: str, value: str) -> "Iterator[Run]":
    """The runs of the experiment that carry the tag and were not deleted."""
    page = None
    while True:
        found = client.search_runs([experiment], f"tags.`{tag}` = '{value}'", page_token=page)
        yield from found
        page = found.token
        if not page:
            return


def log_params(client: "MlflowClient", run_id: str, tree: dict[str, Any]) -> None:
    """Log the leaves of `tree` under dotted keys. MLflow never changes a parameter: those it has stay as they are."""
    from mlflow.entities import Param

    there = client.get_run(run_id).data.params
    leaves = {metric_name(key): value for key, value in _leaves(tree)}
    new = [Param(key, value[:_VALUE_LENGTH]) for key, value in leaves.items() if key not in there]
    for start in range(0, len(new), _PARAMS_A_CALL):
        client.log_batch(run_id, params=new[start : start + _PARAMS_A_CALL])


def log_tags(client: "MlflowClient", run_id: str, tags: dict[str, str]) -> None:
    """Set tags, over those there are."""
    from mlflow.entities import RunTag

    entries = [RunTag(key[:_KEY_LENGTH], value[:_VALUE_LENGTH]) for key, value in tags.items()]
    for start in range(0, len(entries), _PARAMS_A_CALL):
        client.log_batch(run_id, tags=entries[start : start + _PARAMS_A_CALL])


def log_points(client: "MlflowClient", run_id: str, points: "list[Metric]") -> None:
    """Log points of metrics in their order; MLflow keeps a point that it has at another time as a second one."""
    for start in range(0, len(points), _METRICS_A_CALL):
        client.log_batch(run_id, metrics=points[start : start + _METRICS_A_CALL])


def steps_of(client: "MlflowClient", run_id: str) -> dict[str, set[int]]:
    """The steps that a run has of each metric."""
    names = client.get_run(run_id).data.metrics
    return {name: {point.step for point in client.get_metric_history(run_id, name)} for name in names}


def point(key: str, value: float, step: int, unix_seconds: float) -> "Metric":
    """One number at one step."""
    from mlflow.entities import Metric

    return Metric(metric_name(key), float(value), round(unix_seconds * 1000), step)


@lru_cache
def metric_name(key: str) -> str:
    """`key` in the letters that MLflow allows, for a metric or a parameter."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key)[:_KEY_LENGTH]


def log_trial(
    client: "MlflowClient", experiment: str, parent: str, row: dict[str, Any], begun: "Run | None" = None
) -> None:
    """A trial's row of results.jsonl as a run nested under `parent`.

    Args:
        begun: what an earlier start left half-logged, to be completed.
    """
    name = f"{row['task']} {row['init']} seed {row['seed']}"
    tags = {PARENT_TAG: parent, TRIAL_TAG: row["key"], "task": row["task"], "init": row["init"]}
    now = round(time.time() * 1000)
    started = now - round(1000 * row["seconds"])
    run = begun or client.create_run(experiment, start_time=started, tags=tags, run_name=name)
    run_id = run.info.run_id
    described = ("task", "kind", "metric", "init", "seed", "checkpoint_step", "hyperparameters")
    log_params(client, run_id, {key: row[key] for key in described if key in row})
    if row.get("error"):
        client.set_tag(run_id, "error", row["error"][:_VALUE_LENGTH])
    numbers = {**row.get("other_metrics", {}), "dev_value": row.get("dev_value"), "seconds": row["seconds"]}
    numbers |= {row["metric"]: row["value"], "value": row["value"]}
    # The run's own start as the time: logged twice, they are the same points.
    points = [point(key, value, 0, run.info.start_time / 1000) for key, value in numbers.items() if is_number(value)]
    log_points(client, run_id, points)
    client.set_terminated(run_id, "FINISHED" if row["status"] == "ok" else "FAILED", end_time=now)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a chart can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict | list) and tree:
        items: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree if isinstance(tree, str) else json.dumps(tree, default=str)


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _create_sqlite(database: Path) -> None:
    """Under another name first: one that was killed among MLflow's migrations can be neither used nor repaired."""
    from filelock import FileLock

    if database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock"):
        if database.exists():
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        unfinished = database.with_name(database.name + ".new")
        unfinished.unlink(missing_ok=True)
        store = SqlAlchemyStore(f"sqlite:///{unfinished}", (database.parent / "mlartifacts").as_uri())
        store.engine.dispose()
        os.replace(unfinished, database)
