"""Several drivers write to one server at once: those of different runs, and one beside the driver of its run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tracked_runs import append, follow_once, history, row, start, trials_of
from tracking_server import Tracking

from multihop.cluster.tracking.connection import connect
from multihop.cluster.tracking.tracker import is_behind

ROOT = Path(__file__).parents[3]
TRIALS = 5
DRIVER = """
import sys
from pathlib import Path
from tracked_runs import append, follow_once, row, start, trial
run_dir, trials = Path(sys.argv[1]), int(sys.argv[3])
append(run_dir, *(row(step, 1.0 / step) for step in range(1, 50)))
tracker = start(run_dir, sys.argv[2])
follow_once(tracker)
for number in range(trials):
    tracker.log_trials([trial(f"k{number}", seed=number)])
tracker.close("done")
"""
BESIDE = """
import sys
from pathlib import Path
from multihop.cluster.tracking.tracker import log_concurrently
from tracked_runs import trial
assert all(log_concurrently(Path(sys.argv[1]), sys.argv[2], [trial(f"k{n}", seed=n)]) for n in range(int(sys.argv[3])))
"""


def driver(code: str, run_dir: Path, url: str) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", code, str(run_dir), url, str(TRIALS)], env=environment)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_run_has_its_metrics_and_trials_once(tracking: Tracking, tmp_path: Path) -> None:
    names, url = ("first", "second", "shared"), tracking.server.url  # other tests' runs in the server have other names
    for name in names:
        (tmp_path / name).mkdir()
    shared = start(tmp_path / "shared", url)
    drivers = [driver(DRIVER, tmp_path / name, url) for name in names[:2]] + [driver(BESIDE, tmp_path / "shared", url)]
    append(tmp_path / "shared", *(row(step, 1.0 / step) for step in range(1, 50)))
    follow_once(shared)
    assert [each.wait() for each in drivers] == [0, 0, 0]
    shared.close("trained")
    client = connect(url)
    experiment = client.get_experiment_by_name("multihop").experiment_id
    for name in names:
        assert not is_behind(tmp_path / name)
        [run] = client.search_runs([experiment], f"params.name = 'a' and tags.`mlflow.runName` = '{name}'")
        assert history(client, run.info.run_id, "loss") == [(step, 1.0 / step) for step in range(1, 50)]
        assert set(trials_of(client, run.info.run_id)) == {f"k{number}" for number in range(TRIALS)}
