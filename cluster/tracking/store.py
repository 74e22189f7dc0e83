"""Idempotent operations on the MLflow store: repeating one after a crash leaves no duplicates."""

import json
import logging
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from multihop.common.errors import UserError
from multihop.common.redaction import redacted
from multihop.eval.trials.trial import trial_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

STORE_FILES = ("mlflow.db", "mlartifacts")
"""Prefixes of the local store's file names in the runs directory, locks and journals included."""
TOKEN_TAG, TRIAL_TAG, PARENT_TAG = "multihop.token", "multihop.trial_key", "mlflow.parentRunId"
PLANNED_TAG = "multihop.planned"
"""Tag of a trial: whether it is in the plan of the last evaluation, so that reports show it."""
_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")
_TRIAL_PARAMS = (
    *("task", "kind", "metric", "init", "start_from", "seed", "checkpoint_step", "hyperparameters"),
    *("checkpoint_sha256", "task_fingerprint", "test_fingerprint", "tokenizer_sha256"),
)
_KEY_LENGTH, _VALUE_LENGTH = 250, 6000  # MLflow's limits (mlflow.utils.validation)
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100
# Callers continue without MLflow and retry later, so requests should fail fast.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}


def store_uri(runs: Path, given: str | None = None) -> str:
    """The tracking URI: `given`, else MLFLOW_TRACKING_URI, else an SQLite file in the runs directory.

    Raises:
        UserError: MLflow does not support the URI.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{os.path.realpath(runs)}/mlflow.db"
    if urlsplit(uri).scheme.partition("+")[0] not in _SCHEMES and uri != "databricks":
        raise UserError(
            f"tracking.uri={redacted(uri)} is not a tracking server or database; write http://HOST:PORT or "
            "sqlite:///PATH, or omit it for SQLite in the runs directory"
        )
    return uri


def connect(uri: str) -> "MlflowClient":
    """A client of the store. A missing SQLite store is created first, which takes MLflow some seconds."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    database = _sqlite_path(uri)
    if database is not None:
        _create_sqlite(database)
    return MlflowClient(tracking_uri=uri)


def experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    """The id of the experiment of this name, created if it does not exist.

    Raises:
        UserError: it was deleted in MLflow.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        database = _sqlite_path(uri)
        artifacts = (database.parent / "mlartifacts").as_uri() if database is not None else None
        kind = {"mlflow.experimentKind": "custom_model_development"}  # selects the page that MLflow shows first
        return str(client.create_experiment(name, artifact_location=artifacts, tags=kind))
    if found.lifecycle_stage != "active":
        raise UserError(
            f"tracking.experiment={name} was deleted in MLflow; restore it with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}`, or choose another name"
        )
    return str(found.experiment_id)


def search(client: "MlflowClient", experiment: str, tag: str, value: str) -> "Iterator[Run]":
    """The runs of the experiment with this tag, without deleted ones."""
    page = None
    while True:
        found = client.search_runs([experiment], f"tags.`{tag}` = '{value}'", page_token=page)
        yield from found
        page = found.token
        if not page:
            return


def nested_runs(client: "MlflowClient", experiment: str, parent: str) -> "tuple[set[str], dict[str, Run]]":
    """The keys of the trials that are logged under `parent`, and by key the runs of those that are partly logged.

    A request that timed out may have created a second run of a trial after all: one that is not finished is deleted.
    """
    nested: dict[str, Run] = {}
    found = search(client, experiment, PARENT_TAG, parent)
    for run in sorted(found, key=lambda run: (run.info.status == "RUNNING", run.info.start_time, run.info.run_id)):
        first = nested.setdefault(run.data.tags[TRIAL_TAG], run)
        if first is not run and run.info.status == "RUNNING":
            client.delete_run(run.info.run_id)
    begun = {key: run for key, run in nested.items() if run.info.status == "RUNNING"}
    return set(nested) - set(begun), begun


def log_params(client: "MlflowClient", run_id: str, tree: dict[str, Any]) -> None:
    """Log the leaves of `tree` under dotted keys. MLflow parameters are immutable, so existing ones are left alone."""
    from mlflow.entities import Param

    there = client.get_run(run_id).data.params
    leaves = {metric_name(key): value for key, value in _leaves(tree)}
    new = [Param(key, value[:_VALUE_LENGTH]) for key, value in leaves.items() if key not in there]
    for start in range(0, len(new), _PARAMS_A_CALL):
        client.log_batch(run_id, params=new[start : start + _PARAMS_A_CALL])


def log_tags(client: "MlflowClient", run_id: str, tags: dict[str, str]) -> None:
    """Set tags, replacing existing values."""
    from mlflow.entities import RunTag

    entries = [RunTag(key[:_KEY_LENGTH], value[:_VALUE_LENGTH]) for key, value in tags.items()]
    for start in range(0, len(entries), _PARAMS_A_CALL):
        client.log_batch(run_id, tags=entries[start : start + _PARAMS_A_CALL])


def log_points(client: "MlflowClient", run_id: str, points: "list[Metric]") -> None:
    """Log metric points in order. MLflow stores a point again if its time differs."""
    for start in range(0, len(points), _METRICS_A_CALL):
        client.log_batch(run_id, metrics=points[start : start + _METRICS_A_CALL])


def steps_of(client: "MlflowClient", run_id: str) -> dict[str, set[int]]:
    """The logged steps of each metric of a run."""
    names = client.get_run(run_id).data.metrics
    return {name: {point.step for point in client.get_metric_history(run_id, name)} for name in names}


def log_new_points(client: "MlflowClient", run_id: str, scores: Sequence[tuple[str, int, float]]) -> None:
    """Log (name, step, value), but for those whose last logged value at that step is the same."""
    there: dict[tuple[str, int], float] = {}
    for name in {metric_name(name) for name, _, _ in scores}:
        history = client.get_metric_history(run_id, name)
        there |= {(name, old.step): old.value for old in sorted(history, key=lambda old: old.timestamp)}
    now = time.time()
    new = [each for each in scores if there.get((metric_name(each[0]), each[1])) != each[2]]
    log_points(client, run_id, [point(name, value, step, now) for name, step, value in new])


def point(key: str, value: float, step: int, unix_seconds: float) -> "Metric":
    """One value of a metric at a step."""
    from mlflow.entities import Metric

    return Metric(metric_name(key), float(value), round(unix_seconds * 1000), step)


@lru_cache
def metric_name(key: str) -> str:
    """`key` with characters that MLflow does not allow in metric and parameter names replaced by _."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key)[:_KEY_LENGTH]


def log_trial(
    client: "MlflowClient", experiment: str, parent: str, row: dict[str, Any], begun: "Run | None" = None
) -> None:
    """Log a trial's row of results.jsonl as a run nested under `parent`.

    Args:
        begun: the nested run if an earlier start logged part of it.
    """
    name = trial_name(row)
    tags = {PARENT_TAG: parent, TRIAL_TAG: row["key"], "task": row["task"], "init": row["init"]}
    now = round(time.time() * 1000)
    started = now - round(1000 * row["seconds"])
    run = begun or client.create_run(experiment, start_time=started, tags=tags, run_name=name)
    run_id = run.info.run_id
    log_params(client, run_id, {key: row[key] for key in _TRIAL_PARAMS if key in row})
    if row.get("error"):
        client.set_tag(run_id, "error", row["error"][:_VALUE_LENGTH])
    numbers = {**row.get("other_metrics", {}), "dev_value": row.get("dev_value"), "seconds": row["seconds"]}
    numbers |= {row["metric"]: row["value"], "value": row["value"]}
    # Timestamped with the run's start, so that logging twice gives the same points.
    at = run.info.start_time / 1000
    points = [point(key, value, 0, at) for key, value in numbers.items() if is_number(value)]
    for curve, metric in (("loss", "train_loss"), ("dev", f"dev {row['metric']}")):
        points += [
            point(metric, value, step, at)
            for step, value in (row.get("curve") or {}).get(curve, [])
            if is_number(value)
        ]
    log_points(client, run_id, points)
    client.set_terminated(run_id, "FINISHED" if row["status"] == "ok" else "FAILED", end_time=now)


def tag_planned(client: "MlflowClient", experiment: str, parent: str, keys: Collection[str]) -> None:
    """Tag each trial nested under the run `parent` with whether its key is in `keys`."""
    for run in search(client, experiment, PARENT_TAG, parent):
        planned = "true" if run.data.tags.get(TRIAL_TAG) in keys else "false"
        if run.data.tags.get(PLANNED_TAG) != planned:
            client.set_tag(run.info.run_id, PLANNED_TAG, planned)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    # A list of plain values is one value: [-4, -3, -2, -1].
    if (isinstance(tree, dict) and tree) or (isinstance(tree, list) and any(isinstance(i, dict | list) for i in tree)):
        items: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree if isinstance(tree, str) else json.dumps(tree, default=str)


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _create_sqlite(database: Path) -> None:
    """Create it under a temporary name: a store killed during MLflow's migrations is unusable."""
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
