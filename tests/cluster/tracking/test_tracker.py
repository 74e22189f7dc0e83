"""What a run logs, read back with MLflow's client from a real store and a real server."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.tracking.beside import log_beside
from cluster.tracking.store import connect, store_uri
from cluster.tracking.tracker import Tracker, is_behind, open_run

RECIPE = {"name": "a", "phases": [{"seq_len": 64, "lr": 1e-3}], "model": {"layers": 2}, "long": "x" * 9000}
START = 1_700_000_000.0


@pytest.fixture(scope="module")
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


def trial(key: str, seed: int = 0, status: str = "ok", value: float | None = 0.75) -> dict[str, Any]:
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
    }


def trials_of(client: Any, run_id: str) -> dict[str, Any]:
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'")
    assert len({run.data.tags["multihop.trial_key"] for run in found}) == len(found)
    return {run.data.tags["multihop.trial_key"]: run for run in found}


def test_rows_become_points_in_order_with_the_first_of_a_step(run_dir: Path) -> None:
    append(run_dir, row(0, 9.0), row(10, 8.0), row(20, 7.0, heldout_loss=7.5))
    append(run_dir, row(10, 8.5, START + 99), row(20, 7.25, START + 99, lr=0.5), row(30, 6.0))
    tracker = start(run_dir)
    follow_once(tracker)
    client = client_of(run_dir)
    assert history(client, tracker.run_id, "loss") == [(0, 9.0), (10, 8.0), (20, 7.0), (30, 6.0)]
    assert history(client, tracker.run_id, "heldout_loss") == [(20, 7.5)]
    assert history(client, tracker.run_id, "lr") == [(20, 0.5)]
    assert client.get_metric_history(tracker.run_id, "loss")[1].timestamp == round((START + 10) * 1000)


def test_a_torn_line_waits_and_a_broken_one_is_skipped(run_dir: Path) -> None:
    append(run_dir, row(1, 5.0))
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(f'{{"time": {START + 2}, "step": 2, "lo')
    tracker, client = start(run_dir), client_of(run_dir)
    follow_once(tracker)
    assert history(client, tracker.run_id, "loss") == [(1, 5.0)]
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('ss": 4.5}\n{"step": 3, "lo{"step": 3, "loss": 4.0}\n')
    append(run_dir, row(4, 3.5))
    follow_once(tracker)
    assert history(client, tracker.run_id, "loss") == [(1, 5.0), (2, 4.5), (4, 3.5)]


def test_more_points_than_a_call_takes(run_dir: Path) -> None:
    append(run_dir, *(row(step, 1.0 + step) for step in range(2500)))
    tracker = start(run_dir)
    follow_once(tracker)
    assert history(client_of(run_dir), tracker.run_id, "loss") == [(step, 1.0 + step) for step in range(2500)]


def test_resuming_continues_the_same_run(run_dir: Path) -> None:
    append(run_dir, row(1, 5.0))
    first = start(run_dir, commit="one")
    follow_once(first)
    first.close("stopped")
    client = client_of(run_dir)
    assert client.get_run(first.run_id).info.status == "KILLED"

    append(run_dir, row(1, 5.5, START + 50), row(2, 4.0))
    second = open_run(run_dir, {**RECIPE, "new": {"key": 1}}, None, "multihop", {"commit": "two"})
    assert client.get_run(first.run_id).info.status == "RUNNING"
    follow_once(second)
    second.close("done")
    run = client.get_run(first.run_id)
    assert second.run_id == first.run_id
    assert run.info.status == "FINISHED"
    assert history(client, first.run_id, "loss") == [(1, 5.0), (2, 4.0)]
    assert run.data.tags["commit"] == "two"
    assert run.data.params["phases.0.seq_len"] == "64"
    assert run.data.params["new.key"] == "1"
    assert len(run.data.params["long"]) == 6000


def test_a_crash_after_logging_and_before_it_was_noted(run_dir: Path) -> None:
    """MLflow has points and trials that tracking.json does not know of."""
    first = start(run_dir)
    before = (run_dir / "tracking.json").read_bytes()
    append(run_dir, row(1, 5.0), {"step": 2, "loss": 4.0})  # a row without a time gets a new one each time
    follow_once(first)
    first.log_trials([trial("k1")])
    (run_dir / "tracking.json").write_bytes(before)
    assert is_behind(run_dir)

    second, client = start(run_dir), client_of(run_dir)
    follow_once(second)
    second.log_trials([trial("k1"), trial("k2")])
    assert second.run_id == first.run_id
    assert history(client, first.run_id, "loss") == [(1, 5.0), (2, 4.0)]
    assert sorted(trials_of(client, first.run_id)) == ["k1", "k2"]


@pytest.mark.parametrize("same_start", [False, True])
def test_rows_of_new_steps_are_logged_after_a_power_cut_shortened_the_file(run_dir: Path, same_start: bool) -> None:
    """MLflow has steps whose rows the disk lost; rows of later steps take their place in the file."""
    append(run_dir, *(row(step, 1.0) for step in range(1, 21)))
    metrics = run_dir / "metrics.jsonl"
    tracker, client = start(run_dir), client_of(run_dir)
    follow_once(tracker)
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:15]) + lines[15][:9])
    if same_start:
        follow_once(tracker)
    metrics.write_bytes(b"".join(lines[:15]))
    append(run_dir, *(row(step, 2.0, START + 99) for step in range(19, 41)))
    if not same_start:
        tracker = start(run_dir)
    follow_once(tracker)
    tracker.close("trained")
    assert history(client, tracker.run_id, "loss") == [(step, 1.0 if step < 21 else 2.0) for step in range(1, 41)]


def test_an_unnoticed_cut_is_repaired_at_the_end(run_dir: Path) -> None:
    append(run_dir, row(1, 5.0), row(2, 4.0))
    tracker = start(run_dir)
    follow_once(tracker)
    append(run_dir, row(4, 2.0))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text(lines[0] + lines[2])
    append(run_dir, row(5, 1.0))
    follow_once(tracker)
    tracker.close("done")
    assert [step for step, _ in history(client_of(run_dir), tracker.run_id, "loss")] == [1, 2, 4, 5]


@pytest.mark.parametrize("content", [b"", b'{"uri": "sq', b"[]", b'{"token": 5}', b'{"uri": "u", "experiment": "e"}'])
def test_a_damaged_note_ends_nothing_and_is_named(
    run_dir: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    append(run_dir, row(1, 5.0))
    first = start(run_dir)
    (run_dir / "tracking.json").write_bytes(content)
    assert is_behind(run_dir)
    second = start(run_dir)
    second.close("done")
    assert not is_behind(run_dir)
    assert second.run_id not in ("", first.run_id)
    assert history(client_of(run_dir), second.run_id, "loss") == [(1, 5.0)]
    (warning,) = [record.message for record in caplog.records if record.name == "cluster.tracking.tracker"]
    assert "a/tracking.json" in warning and "a new MLflow run is created" in warning


def test_a_crash_before_the_runs_id_was_noted(run_dir: Path) -> None:
    first = start(run_dir)
    state = json.loads((run_dir / "tracking.json").read_text())
    (run_dir / "tracking.json").write_text(json.dumps({**state, "run_id": ""}))
    assert start(run_dir).run_id == first.run_id


def test_trials_are_nested_runs_logged_once(run_dir: Path) -> None:
    tracker, client = start(run_dir), client_of(run_dir)
    tracker.log_trials([trial("k1"), trial("k2", seed=1, status="failed", value=None)])
    tracker.log_trials([trial("k1")])
    tracker.close("done")
    runs = trials_of(client, tracker.run_id)
    assert {key: run.info.status for key, run in runs.items()} == {"k1": "FINISHED", "k2": "FAILED"}
    assert runs["k1"].data.metrics == {
        "accuracy": 0.75,
        "value": 0.75,
        "dev_value": 0.75,
        "seconds": 12.5,
        "macro F1 ___": 70.5,
    }
    params = runs["k1"].data.params
    assert params["hyperparameters.lr"] == "5e-05"
    assert params["hyperparameters.features.layers"] == "[-2, -1]"
    assert params["hyperparameters.features.head"] == "linear"
    assert runs["k1"].info.run_name == "topics random seed 0 frozen lr 5e-05"
    assert not {"value", "accuracy"} & set(runs["k2"].data.metrics)


def test_scores_are_metrics_of_the_run_logged_when_they_change(run_dir: Path) -> None:
    tracker, client = start(run_dir), client_of(run_dir)
    tracker.log_scores([("topics accuracy", 10, 0.5), ("topics accuracy", 20, 0.75), ("topics macro F1 (%)", 0, 1.0)])
    tracker.close("done")
    again = start(run_dir)
    again.log_scores([("topics accuracy", 10, 0.5), ("topics accuracy", 20, 0.625)])
    again.close("done")
    history = client.get_metric_history(tracker.run_id, "topics accuracy")
    assert [(point.step, point.value) for point in history] == [(10, 0.5), (20, 0.75), (20, 0.625)]
    assert client.get_run(tracker.run_id).data.metrics == {"topics accuracy": 0.625, "topics macro F1 ___": 1.0}


def test_a_half_logged_trial_is_completed(run_dir: Path) -> None:
    tracker, client = start(run_dir), client_of(run_dir)
    experiment = client.get_run(tracker.run_id).info.experiment_id
    tags = {"mlflow.parentRunId": tracker.run_id, "multihop.trial_key": "k1"}
    begun = client.create_run(experiment, tags=tags)
    again = start(run_dir)
    again.log_trials([trial("k1")])
    run = trials_of(client, tracker.run_id)["k1"]
    assert run.info.run_id == begun.info.run_id
    assert run.info.status == "FINISHED"
    assert run.data.metrics["accuracy"] == 0.75


def test_trials_logged_beside_the_driver_are_logged_once_and_leave_its_run_alone(run_dir: Path) -> None:
    assert not log_beside(run_dir, None, [trial("k1")]), "there is no run of the driver yet"
    tracker, client = start(run_dir), client_of(run_dir)
    append(run_dir, row(1, 5.0))
    before, note = client.get_run(tracker.run_id).to_dictionary(), (run_dir / "tracking.json").read_bytes()
    for rows in ([trial("k1")], [trial("k1"), trial("k2", seed=1)]):
        assert log_beside(run_dir, None, rows)
    assert not log_beside(run_dir, "http://127.0.0.1:1", [trial("k4")])
    assert client.get_run(tracker.run_id).to_dictionary() == before
    assert (run_dir / "tracking.json").read_bytes() == note
    tracker.look_again()
    tracker.log_trials([trial("k1"), trial("k2", seed=1), trial("k3", seed=2)])
    tracker.close("done")
    assert {run.info.status for run in trials_of(client, tracker.run_id).values()} == {"FINISHED"}
    assert set(trials_of(client, tracker.run_id)) == {"k1", "k2", "k3"}
    assert history(client, tracker.run_id, "loss") == [(1, 5.0)]


def test_existing_artifacts_are_logged(run_dir: Path) -> None:
    (run_dir / "report.md").write_text("a result")
    tracker, client = start(run_dir), client_of(run_dir)
    tracker.log_artifacts([run_dir / "report.md", run_dir / "loss.png"])
    tracker.close("done")
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["report.md"]
    assert not is_behind(run_dir)
    assert list((run_dir.parent / "mlartifacts").rglob("report.md"))


def test_a_run_deleted_in_mlflow_is_logged_again(run_dir: Path) -> None:
    append(run_dir, row(1, 5.0))
    first, client = start(run_dir), client_of(run_dir)
    follow_once(first)
    client.delete_run(first.run_id)
    second = start(run_dir)
    follow_once(second)
    assert second.run_id != first.run_id
    assert history(client, second.run_id, "loss") == [(1, 5.0)]


def test_a_deleted_experiment_is_the_users_mistake(run_dir: Path) -> None:
    client = client_of(run_dir)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(ValueError, match=r"tracking\.experiment=gone was deleted"):
        open_run(run_dir, RECIPE, None, "gone", {})


@pytest.mark.parametrize("uri", ["redis://here", "runs/mlruns", "localhost:5000", "ftp://user:hunter2@host"])
def test_an_impossible_store_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(ValueError, match=r"tracking\.uri=") as failed:
        store_uri(tmp_path, uri)
    assert "hunter2" not in str(failed.value)


def test_the_store_is_the_recipes_or_the_environments_or_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://one:1")
    assert store_uri(tmp_path) == "http://one:1"
    assert store_uri(tmp_path, "http://two:2") == "http://two:2"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(runs: Path, port: int) -> Iterator[None]:
    """MLflow's own server; killed at the end as by a power cut."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{runs}/mlflow.db", "--artifacts-destination", str(runs / "files")]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with open(runs / "server.log", "a") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (runs / "server.log").read_text()
                time.sleep(0.2)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_logged(client: Any, run_id: str, step: int) -> None:
    while step not in dict(history(client, run_id, "loss")):
        time.sleep(0.1)


def test_an_unreachable_server_that_comes_up_dies_and_comes_back(
    run_dir: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows written meanwhile are all logged afterwards, in order, each once.

    The password in the store's URI is in no file and in no message.
    """
    port = free_port()
    uri = f"http://user:hunter2@127.0.0.1:{port}"
    append(run_dir, row(0, 0.0))
    without = start(run_dir, uri)
    follow_once(without)
    without.log_trials([trial("k0")])
    without.close("stopped")
    assert without.run_id == ""
    assert is_behind(run_dir)
    assert "hunter2" not in caplog.text and "http://***@127.0.0.1" in caplog.text
    caplog.clear()
    noted = json.loads((run_dir / "tracking.json").read_text())
    (run_dir / "tracking.json").write_text(json.dumps({**noted, "uri": uri}))  # as older versions did

    with server(run_dir.parent, port):
        tracker = start(run_dir, uri)
        assert tracker.run_id
        following = tracker.follow_metrics()
        following.__enter__()
        append(run_dir, *(row(step, float(step)) for step in range(1, 50)))
        wait_until_logged(client_of(run_dir, uri), tracker.run_id, 49)
    append(run_dir, *(row(step, float(step)) for step in range(50, 100)))
    while tracker.error is None:
        time.sleep(0.1)
    tracker.log_trials([trial("k0"), trial("k1")])
    append(run_dir, *(row(step, -1.0) for step in range(40, 60)), row(100, 100.0))
    with server(run_dir.parent, port):
        following.__exit__(None, None, None)
        tracker.close("trained")
        client = client_of(run_dir, uri)
        assert history(client, tracker.run_id, "loss") == [(step, float(step)) for step in range(101)]
        assert sorted(trials_of(client, tracker.run_id)) == ["k0", "k1"]
        assert client.get_run(tracker.run_id).info.status == "FINISHED"
    assert not is_behind(run_dir)
    assert json.loads((run_dir / "tracking.json").read_text())["token"] == noted["token"]
    assert not [path for path in run_dir.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert (run_dir / "tracking.json").stat().st_mode & 0o777 == 0o600
    said = [record.message for record in caplog.records if record.name == "cluster.tracking.tracker"]
    assert [("is unreachable, retrying" in line, "up to date" in line) for line in said] == [
        (True, False),
        (False, True),
    ]
    printed = capfd.readouterr()
    assert printed.out == "" and "hunter2" not in printed.err + caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflow"]
