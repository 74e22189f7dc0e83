"""Faults of the server and its database during training, which does not wait; no metric is lost or duplicated.

A process that appends to metrics.jsonl takes the place of the ranks.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import steady_writer
from tracked_runs import history, start
from tracking_server import Tracking, wait_for

from multihop.cluster.tracking.connection import connect
from multihop.cluster.tracking.tracker import Tracker, is_behind
from multihop.common.json_lines import read_rows

TIMES = 3
Fault = Callable[[Tracking], AbstractContextManager[None]]
KEYS = ("loss", "lr", "grad_norm", "tokens")


@contextmanager
def steady(metrics: Path, rows_per_s: float) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a process that writes rows until the block ends."""
    writer = subprocess.Popen([sys.executable, steady_writer.__file__, str(metrics), "1", str(rows_per_s)])
    try:
        yield writer
        assert writer.poll() is None
    finally:
        writer.terminate()
        assert writer.wait() == 0


def last_step(metrics: Path) -> int:
    return max((row["step"] for row in read_rows(metrics)), default=0)


def wait_for_more(what: str, count: Callable[[], int], more: int = 20) -> None:
    before = count()
    wait_for(what, lambda: count() >= before + more)


def logged_all(tracking: Tracking, tracker: Tracker, metrics: Path) -> None:
    """Assert that MLflow has each row of the file once, in the file's order, and shows the values of the last one."""
    rows, client = read_rows(metrics), connect(tracking.server.url)
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(rows) + 1))
    for key in KEYS:
        assert history(client, tracker.run_id, key) == [(row["step"], row[key]) for row in rows]
        assert tracking.steps_of(tracker.run_id, key) == steps
        assert client.get_run(tracker.run_id).data.metrics[key] == rows[-1][key]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", [Tracking.stopped, Tracking.full, Tracking.without_database])
def test_training_goes_on_and_every_metric_is_logged_once_in_order(
    tracking: Tracking, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    metrics = run_dir / "metrics.jsonl"
    tracker = start(run_dir, tracking.server.url)
    assert tracker.run_id, tracker.error
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    with tracker.follow_metrics(), steady(metrics, rows_per_s=20):
        for _ in range(TIMES):
            wait_for_more("MLflow logs", lambda: len(tracking.steps_of(tracker.run_id, "loss")))
            with fault(tracking):
                wait_for("the fault is noticed", lambda: tracker.error is not None)
                wait_for_more("training goes on", lambda: last_step(metrics))
            wait_for("MLflow is back", lambda: tracker.error is None)
    tracker.close("trained")
    assert not is_behind(run_dir)
    logged_all(tracking, tracker, metrics)
