"""The MLflow part of `python bench/scale_cluster.py`: a run and its trials in a SQLite store with n runs."""

import json
import sqlite3
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihop.cluster.tracking.connection import connect, store_uri
from multihop.cluster.tracking.fetch import fetch_run
from multihop.cluster.tracking.store import PARENT_TAG, TOKEN_TAG, TRIAL_TAG
from multihop.cluster.tracking.tracker import Tracker, log_concurrently, open_run, read_state

if TYPE_CHECKING:
    from scale_cluster import Parts

TRIALS = 9
"""Trials of each run in the store: nine of ten of MLflow's runs are nested."""
STEPS = 100
METRICS = ("loss", "mlm_loss", "nsp_loss", "lr", "grad_norm", "samples", "tokens", "skipped", "tokens_per_s", "mfu")
TABLES = ("runs", "tags", "params", "metrics", "latest_metrics")
"""Tables of MLflow's store with rows of a run."""
RECIPE = {f"section{i}": {f"key{j}": i * j for j in range(10)} for i in range(6)}


def measure_mlflow(size: int, parts: "Parts") -> None:
    """Measure a run among `size` runs of others, and then a run with `size` trials of its own."""
    with tempfile.TemporaryDirectory(prefix="scale-mlflow-") as folder:
        runs = Path(folder)
        copy_run(runs, track(runs / "template"), size // (1 + TRIALS))
        measure_run(runs, "among n runs", parts)
    with tempfile.TemporaryDirectory(prefix="scale-mlflow-") as folder:
        runs = Path(folder)
        track(runs / "large")
        copy_trials(runs, read_state(runs / "large")["run_id"], size)
        measure_trials_of_run(runs / "large", parts)


def track(run_dir: Path) -> str:
    """Track a run with `TRIALS` trials in the store beside it; returns MLflow's id of the run."""
    tracker = start(run_dir)
    write_metrics(run_dir)
    with tracker.follow_metrics():
        pass
    tracker.log_trials([trial_row(number) for number in range(TRIALS)])
    tracker.tag_planned_trials(trial_row(number)["key"] for number in range(TRIALS))
    tracker.close("done")
    assert tracker.error is None, tracker.error
    return tracker.run_id


def start(run_dir: Path) -> Tracker:
    """Create or resume the MLflow run of a folder."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "recipe.json").write_text(json.dumps(RECIPE))
    tracker = open_run(run_dir, RECIPE, None, "scale", {"commit": "0" * 40, "host": "bench"})
    assert tracker.error is None, tracker.error
    return tracker


def write_metrics(run_dir: Path) -> None:
    """Write `STEPS` rows of metrics.jsonl."""
    rows = ({"step": step, "time": 1.7e9 + step} | dict.fromkeys(METRICS, step / 7) for step in range(STEPS))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trial_row(number: int) -> dict[str, Any]:
    """Return a made-up row of results.jsonl."""
    return {
        "task": "glue/sst2",
        "kind": "classification",
        "metric": "accuracy",
        "init": "pretrained",
        "seed": number,
        "checkpoint_step": 1000,
        "hyperparameters": {"lr": 1e-4, "epochs": 3.0, "batch_size": 16},
        "key": f"{number:064x}",
        "value": 0.8,
        "dev_value": 0.8,
        "other_metrics": {"F1": 0.8},
        "curve": {"loss": [[step, 0.5] for step in range(20)], "dev": [[step, 0.8] for step in range(3)]},
        "status": "ok",
        "seconds": 60.0,
    }


def copy_run(runs: Path, run_id: str, times: int) -> None:
    """Copy a run of the store and its trials, under other ids, tokens and keys, in one transaction."""
    with sqlite3.connect(runs / "mlflow.db") as store:
        nested = store.execute("SELECT run_uuid FROM tags WHERE key = ? AND value = ?", (PARENT_TAG, run_id)).fetchall()
        for _ in range(times - 1):
            parent = uuid.uuid4().hex
            copy_rows(store, run_id, parent, {TOKEN_TAG: uuid.uuid4().hex})
            for (trial,) in nested:
                copy_rows(store, trial, uuid.uuid4().hex, {PARENT_TAG: parent, TRIAL_TAG: 2 * uuid.uuid4().hex})


def copy_trials(runs: Path, parent: str, size: int) -> None:
    """Copy trials of a run until it has `size`, with the keys of `trial_row`; they are not tagged as planned yet."""
    with sqlite3.connect(runs / "mlflow.db") as store:
        (trial,) = store.execute("SELECT run_uuid FROM tags WHERE key = ? LIMIT 1", (TRIAL_TAG,)).fetchone()
        for number in range(TRIALS, size):
            copy_rows(
                store, trial, uuid.uuid4().hex, {TRIAL_TAG: trial_row(number)["key"], "multihop.planned": "false"}
            )


def copy_rows(store: sqlite3.Connection, run_id: str, copy: str, tags: dict[str, str]) -> None:
    """Copy the rows of one of MLflow's runs to another id, with other values of these tags."""
    for table in TABLES:
        columns = [column for _, column, *_ in store.execute(f"PRAGMA table_info({table})")]
        others = ", ".join(column for column in columns if column != "run_uuid")
        store.execute(
            f"INSERT INTO {table} (run_uuid, {others}) SELECT ?, {others} FROM {table} WHERE run_uuid = ?",
            (copy, run_id),
        )
    for key, value in tags.items():
        store.execute("UPDATE tags SET value = ? WHERE run_uuid = ? AND key = ?", (value, copy, key))


def measure_run(runs: Path, name: str, parts: "Parts") -> None:
    """Measure what the driver does for one more run of the store."""
    uri = store_uri(runs)
    client = connect(uri)
    client.search_experiments()  # MLflow's own first use in a process
    parts.number(f"{name}: store (MB)", (runs / "mlflow.db").stat().st_size / 1e6)
    run_dir = runs / "new"
    with parts.of(f"{name}: start a run"):
        start(run_dir)
    with parts.of(f"{name}: resume it by its token"):
        tracker = start(run_dir)
    write_metrics(run_dir)
    with parts.of(f"{name}: log a row of {len(METRICS)} metrics", STEPS), tracker.follow_metrics():
        pass
    number = 20
    rows = [trial_row(1_000_000 + each) for each in range(number)]
    with parts.of(f"{name}: log a trial", number):
        tracker.log_trials(rows)
    with parts.of(f"{name}: find and tag the {number} trials"):
        tracker.tag_planned_trials([row["key"] for row in rows])
    with parts.of(f"{name}: log {number} trials again, which are there"):
        assert log_concurrently(run_dir, None, rows)
    with parts.of(f"{name}: close"):
        tracker.close("done")
    assert tracker.error is None, tracker.error
    with tempfile.TemporaryDirectory() as fetched, parts.of(f"{name}: fetch it for `compare`"):
        fetch_run("new", uri, Path(fetched))


def measure_trials_of_run(run_dir: Path, parts: "Parts") -> None:
    """Measure what the driver does for a run that has all the trials."""
    connect(store_uri(run_dir.parent)).search_experiments()
    with parts.of("n trials of one run: resume"):
        tracker = start(run_dir)
    rows = [trial_row(number) for number in range(parts.size)]
    with parts.of("n trials of one run: log them again, which are there"):
        tracker.log_trials(rows)
    with parts.of("n trials of one run: tag them as planned"):
        tracker.tag_planned_trials([row["key"] for row in rows])
    with parts.of("n trials of one run: tag them again, which they are"):
        tracker.tag_planned_trials([row["key"] for row in rows])
    tracker.close("done")
    assert tracker.error is None, tracker.error
