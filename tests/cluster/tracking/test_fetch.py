"""A run's files are restored from MLflow if its directory is lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import make_run
from mlflow_server import free_port
from tracked_runs import client_of, follow_once

from multihop.cluster.runs.compare import compare, show_comparison
from multihop.cluster.tracking.connection import store_uri
from multihop.cluster.tracking.fetch import fetch_run
from multihop.cluster.tracking.tracker import open_run
from multihop.common.errors import UserError

RUNS: dict[str, Any] = {
    "one": (2, [(0, 9.0), (10, 7.0)], [(0, "random", 0.5), (1, "random", 0.7)]),
    "two": (3, [(0, 9.0), (10, 6.5)], [(0, "pretrained", 0.9)]),
}


@pytest.fixture
def runs(run_dir: Path) -> Path:
    """A runs directory with two runs in MLflow's local store."""
    for name, made in RUNS.items():
        folder = make_run(run_dir.parent / name, *made)
        tracker = open_run(folder, json.loads((folder / "recipe.json").read_text()), None, "multihop", {})
        follow_once(tracker)
        tracker.close("done")
        assert tracker.error is None
    return run_dir.parent


def test_runs_compare_alike_from_their_directories_and_from_mlflow(runs: Path, tmp_path: Path) -> None:
    uri = store_uri(runs)
    fetched = [fetch_run(name, uri, tmp_path / "fetched") for name in RUNS]
    assert compare(fetched) == compare([runs / name for name in RUNS])


def test_the_command_takes_from_mlflow_what_is_not_in_the_folder(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.move(runs / "two", tmp_path / "gone")
    with pytest.raises(UserError, match="no run two in"):
        show_comparison(["one", "two"], runs)
    show_comparison(["one", "two"], runs, store_uri(runs))
    printed = capsys.readouterr().out
    assert "phases[1].lr" in printed and "0.900" in printed
    assert (tmp_path / "compare-one-two.png").exists()


def test_missing_and_ambiguous_names_are_refused(runs: Path, tmp_path: Path) -> None:
    uri, client = store_uri(runs), client_of(runs / "one")
    for name in ("three", "../one", "o'ne", 'o"ne'):
        with pytest.raises(UserError, match=r"no run .* in MLflow at sqlite"):
            fetch_run(name, uri, tmp_path)
    other = client.create_experiment("other")
    client.create_run(other, run_name="bare", tags={"multihop.token": "1"})
    with pytest.raises(UserError, match=r"MLflow has no recipe\.json of the run bare"):
        fetch_run("bare", uri, tmp_path)
    client.create_run(other, run_name="one", tags={"multihop.token": "2"})
    with pytest.raises(UserError, match=r"2 runs are called one .* other \("):
        fetch_run("one", uri, tmp_path)
    client.create_run(other, run_name="two", tags={"mlflow.parentRunId": "2"})
    assert fetch_run("two", uri, tmp_path).name == "two", "a trial of this name is not meant"
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:.* gives no answer"):
        fetch_run("one", f"http://127.0.0.1:{free_port()}", tmp_path)
