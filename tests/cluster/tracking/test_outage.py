"""A server that is killed and comes back, over an SQLite store."""

import json
import threading
import time
from pathlib import Path

import pytest
from mlflow_server import free_port, mlflow_server
from tracked_runs import append, client_of, follow_once, history, row, start, trial, trials_of, wait_until_logged

from multihop.cluster.tracking.tracker import is_behind


@pytest.mark.long
def test_an_unreachable_server_that_comes_up_dies_and_comes_back(
    run_dir: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """All rows written during the outage are logged afterwards, in order, each once.

    The password in the store's URI is in no file and in no message.
    """
    port, store = free_port(), f"sqlite:///{run_dir.parent}/mlflow.db"
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

    with mlflow_server(run_dir.parent, store, port=port):
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
    with mlflow_server(run_dir.parent, store, port=port):
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
    output = [record.message for record in caplog.records if record.name == "multihop.cluster.tracking.tracker"]
    assert [("is unreachable, retrying" in line, "up to date" in line) for line in output] == [
        (True, False),
        (False, True),
    ]
    printed = capfd.readouterr()
    assert printed.out == "" and "hunter2" not in printed.err + caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflow"]
