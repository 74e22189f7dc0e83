"""`multihop run` with a server that is stopped for a minute and a database that is restarted, and one that hangs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from postgres import PASSWORD
from tracked_runs import append, follow_once, history, row, start
from tracking_server import DATABASE, Tracking, wait_for

from multihop.cluster.tracking.connection import connect
from multihop.cluster.tracking.tracker import is_behind, read_state
from multihop.common.json_lines import read_rows

pytestmark = [pytest.mark.long, pytest.mark.ranks, pytest.mark.timeout(1800)]
STEPS = 9000
STOPPED_S = 60


def test_a_run_whose_mlflow_is_away_for_minutes(tracking: Tracking, texts: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "tracked"
    recipe = {
        "name": "tracked",
        "data": {"sources": [{"path": str(texts)}], "heldout_fraction": 0.1},
        "tokenizer": {"vocab_size": 100, "special_tokens": "gpt2"},
        "model": {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 2, "max_positions": 64},
        "objective": {"name": "clm"},
        "phases": [{"seq_len": 64, "global_batch_size": 32, "steps": STEPS, "lr": 2e-3}],
        "engine": {"deepspeed": {}, "micro_batch_size": 16, "log_interval": 5, "eval_interval": 500},
        "checkpoint": {"save_interval": 500, "keep": 2},
        "tracking": {"uri": tracking.server.url},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    path = os.pathsep.join([str(Path(__file__).parents[3] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    multihop = [sys.executable, "-m", "multihop.cluster.cli.main"]
    run = subprocess.Popen([*multihop, "run", "recipe.yaml"], cwd=tmp_path, env=environment)

    def logged() -> int:
        run_id = read_state(run_dir).get("run_id") if run_dir.exists() else None
        return len(tracking.steps_of(run_id, "loss")) if run_id else 0

    try:
        for fault, seconds in ((Tracking.stopped, STOPPED_S), (Tracking.without_database, 20), (Tracking.full, 20)):
            before = logged()
            wait_for("MLflow has more metrics", lambda: logged() > before, 600)  # noqa: B023
            with fault(tracking):
                trained = len(read_rows(run_dir / "metrics.jsonl"))
                time.sleep(seconds)
                assert run.poll() is None
                assert len(read_rows(run_dir / "metrics.jsonl")) > trained
        assert run.wait() == 0
    finally:
        run.kill()
        run.wait()
    rows = read_rows(run_dir / "metrics.jsonl")
    client, run_id = connect(tracking.server.url), read_state(run_dir)["run_id"]
    assert not is_behind(run_dir)
    for key in ("loss", "lr", "heldout_loss", "system/cpu_cores", "system/peak_memory_gb"):
        expected = [(row["step"], row[key]) for row in rows if key in row]
        assert expected and history(client, run_id, key) == expected
        assert tracking.steps_of(run_id, key) == [step for step, _ in expected]
    tracked = client.get_run(run_id)
    assert tracked.info.status == "FINISHED"
    assert (
        '"launch": 1' in tracked.data.tags["multihop.launches"]
        and '"ranks": 2, "nodes": 1' in (tracked.data.tags["multihop.launches"])
    )
    compared = subprocess.run(
        [*multihop, "compare", "tracked", "tracked", "--runs", "elsewhere", "--tracking", tracking.server.url],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    assert f"{STEPS:,}" in compared.stdout


def test_a_database_that_hangs_holds_up_nothing(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver writes to PostgreSQL itself, whose client waits forever."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    run_dir, uri = tmp_path / "hung", tracking.database.uri_of(DATABASE)
    run_dir.mkdir()
    append(run_dir, row(1, 5.0))
    tracker = start(run_dir, uri)
    follow_once(tracker)
    assert tracking.steps_of(tracker.run_id, "loss") == [1]
    append(run_dir, row(2, 4.0))
    tracking.database.pause()
    try:
        tracker.close("done")
        assert isinstance(tracker.error, TimeoutError) and is_behind(run_dir)
    finally:
        tracking.database.resume()
    again = start(run_dir, uri)
    follow_once(again)
    again.close("done")
    assert again.run_id == tracker.run_id and not is_behind(run_dir)
    assert history(connect(uri), again.run_id, "loss") == [(1, 5.0), (2, 4.0)]
