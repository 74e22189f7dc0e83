"""Idempotent operations on the MLflow store: repeating one after a crash leaves no duplicates."""

import json
import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from multihop.cluster.tracking.connection import artifact_location, note_answer
from multihop.common.errors import UserError
from multihop.common.json_lines import Row
from multihop.eval.trials.trial import trial_name
from multihop.pretrain.run.changes import flatten

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

TOKEN_TAG, TRIAL_TAG, PARENT_TAG = "multihop.token", "multihop.trial_key", "mlflow.parentRunId"
PLANNED_TAG = "multihop.planned"
"""Tag of a trial: whether it is in the plan of the last evaluation, so that reports show it; "true" while that runs."""
_TRIAL_PARAMS = (
    *("task", "kind", "metric", "init", "start_from", "seed", "checkpoint_step", "hyperparameters"),
    *("checkpoint_sha256", "task_fingerprint", "test_fingerprint", "tokenizer_sha256", "average_with_sha256"),
)
_KEY_LENGTH, _VALUE_LENGTH = 250, 6000  # MLflow's limits (mlflow.utils.validation)
AUDITS_TAG = "multihop.audits"
"""Tag of a run: the audits of its checkpoints, as in summary.json."""
LAUNCHES_TAG = "multihop.launches"
"""Tag of a run: when its ranks were started, from which step, how many ranks on how many nodes."""
CHANGED_TAG = "multihop.changed_parameters"
"""Tag of a run: the present values of the parameters that were logged with other values."""
_LAUNCH_KEYS = ("time", "step", "world_size")
_LONGEST_TAG = 5000
"""Characters; MLflow takes 8000, some of its stores 5000."""
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100


def experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    """Return the id of the experiment of this name, created if it does not exist.

    Raises:
        UserError: it was deleted in MLflow.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        kind = {"mlflow.experimentKind": "custom_model_development"}  # selects the page that MLflow shows first
        return str(client.create_experiment(name, artifact_location=artifact_location(uri), tags=kind))
    if experiment.lifecycle_stage != "active":
        raise UserError(
            f"tracking.experiment={name} was deleted in MLflow; restore it with `mlflow experiments restore "
            f"--experiment-id {experiment.experiment_id}`, or choose another name"
        )
    return str(experiment.experiment_id)


def search(client: "MlflowClient", experiment: str, tag: str, value: str) -> "Iterator[Run]":
    """Yield the runs of the experiment with this tag, without deleted ones."""
    page = None
    while True:
        runs = client.search_runs([experiment], f"tags.`{tag}` = '{value}'", page_token=page)
        note_answer()
        yield from runs
        page = runs.token
        if not page:
            return


def nested_runs(client: "MlflowClient", experiment: str, parent: str) -> "tuple[set[str], dict[str, Run]]":
    """Return the keys of the trials that are logged under `parent`, and by key the runs of those that are partly
    logged.

    A request that timed out may have created a second run of a trial after all: one that is not finished is deleted.
    """
    nested: dict[str, Run] = {}
    runs = search(client, experiment, PARENT_TAG, parent)
    for run in sorted(runs, key=lambda run: (run.info.status == "RUNNING", run.info.start_time, run.info.run_id)):
        first = nested.setdefault(run.data.tags[TRIAL_TAG], run)
        if first is not run and run.info.status == "RUNNING":
            client.delete_run(run.info.run_id)
    begun = {key: run for key, run in nested.items() if run.info.status == "RUNNING"}
    return set(nested) - set(begun), begun


def log_params(client: "MlflowClient", run_id: str, tree: dict[str, Any]) -> None:
    """Log the leaves of `tree` under their keys (`param_name`).

    Parameters are immutable in MLflow. The tag CHANGED_TAG has the present values of those that were logged with others
    at an earlier start, as many as fit.
    """
    from mlflow.entities import Param

    run = client.get_run(run_id).data
    texts = {param_name(key): _as_text(value)[:_VALUE_LENGTH] for key, value in flatten(tree).items()}
    new = [Param(key, text) for key, text in texts.items() if key not in run.params]
    for start in range(0, len(new), _PARAMS_A_CALL):
        client.log_batch(run_id, params=new[start : start + _PARAMS_A_CALL])
    changed: dict[str, str] = {}
    for key, text in texts.items():
        more = {**changed, key: text}
        if run.params.get(key, text) != text and len(json.dumps(more)) <= _LONGEST_TAG:
            changed = more
    if changed or CHANGED_TAG in run.tags:
        log_tags(client, run_id, {CHANGED_TAG: json.dumps(changed)})


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
        note_answer()


def steps_of(client: "MlflowClient", run_id: str) -> dict[str, set[int]]:
    """Return the logged steps of each metric of a run."""
    names = client.get_run(run_id).data.metrics
    return {name: {point.step for point in client.get_metric_history(run_id, name)} for name in names}


def log_new_points(client: "MlflowClient", run_id: str, scores: Sequence[tuple[str, int, float]]) -> None:
    """Log (name, step, value), but for those whose last logged value at that step is the same."""
    logged: dict[tuple[str, int], float] = {}
    for name in {metric_name(name) for name, _, _ in scores}:
        history = client.get_metric_history(run_id, name)
        logged |= {(name, old.step): old.value for old in sorted(history, key=lambda old: old.timestamp)}
    now = time.time()
    new = [each for each in scores if logged.get((metric_name(each[0]), each[1])) != each[2]]
    log_points(client, run_id, [point(name, value, step, now) for name, step, value in new])


def point(key: str, value: float, step: int, unix_seconds: float) -> "Metric":
    """Return one value of a metric at a step."""
    from mlflow.entities import Metric

    return Metric(metric_name(key), float(value), round(unix_seconds * 1000), step)


def param_name(key: str) -> str:
    """Return MLflow's name of a recipe key: `phases.0.lr` for `phases[0].lr`, because MLflow allows no brackets."""
    return metric_name(re.sub(r"\[(\d+)\]", r".\1", key))


@lru_cache
def metric_name(key: str) -> str:
    """Replace characters in `key` that MLflow does not allow in metric and parameter names by _."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key)[:_KEY_LENGTH]


def log_trial(
    client: "MlflowClient", experiment: str, parent: str, row: dict[str, Any], begun: "Run | None" = None
) -> None:
    """Log a trial's row of results.jsonl as a run nested under `parent`.

    Args:
        begun: the nested run if an earlier start logged part of it.
    """
    name = trial_name(row)
    tags = {PARENT_TAG: parent, TRIAL_TAG: row["key"], PLANNED_TAG: "true", "task": row["task"], "init": row["init"]}
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
    note_answer()


def tag_planned(client: "MlflowClient", experiment: str, parent: str, keys: Collection[str]) -> None:
    """Tag each trial nested under the run `parent` with whether its key is in `keys`."""
    for run in search(client, experiment, PARENT_TAG, parent):
        planned = "true" if run.data.tags.get(TRIAL_TAG) in keys else "false"
        if run.data.tags.get(PLANNED_TAG) != planned:
            client.set_tag(run.info.run_id, PLANNED_TAG, planned)
            note_answer()


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def launches_tag(rows: Sequence[Row]) -> str:
    """Return the launches of a run's ranks, from rows of launches.jsonl, as a JSON list, oldest first.

    Each has a number (from 1 on), the UTC time, the step, the ranks, and the nodes if known. Only the newest that fit
    are listed; their numbers show how many there were. Empty without rows.
    """
    complete = [row for row in rows if all(is_number(row.get(key)) for key in _LAUNCH_KEYS)]
    launches = []
    for number, row in enumerate(complete, start=1):
        launched_at = datetime.fromtimestamp(row["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        launch = {"launch": number, "time": launched_at, "step": row["step"], "ranks": row["world_size"]}
        if "nodes" in row:  # rows of older versions have none
            launch["nodes"] = row["nodes"]
        launches.append(launch)
    return newest_as_tag(launches) if launches else ""


def newest_as_tag(values: Sequence[Row]) -> str:
    """Return the last of these values, as many as fit into a tag, as a JSON list."""
    newest: list[str] = []
    for value in reversed(values):
        newest.insert(0, json.dumps(value))
        if sum(map(len, newest)) + 2 * len(newest) > _LONGEST_TAG:
            return f"[{', '.join(newest[1:])}]"
    return f"[{', '.join(newest)}]"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
