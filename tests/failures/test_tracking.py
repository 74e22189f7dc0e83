"""Metrics and trials on their way to MLflow."""

import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulation.every_failure import Scenario, check_every_failure, every_and_seed
from simulation.world import World
from tables_of_tests import Table
from tracked_runs import append, client_of, history, row, start, trial

from multihop.cluster.tracking import tracker
from multihop.common import clock
from multihop.common.json_lines import read_rows


class _Client:
    """MLflow's client, each request of which is an operation of the world. It dates a run before it sends the request
    to create it."""

    def __init__(self, world: World, client: Any) -> None:
        self._world, self._client = world, client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        what = "query" if name.startswith(("search", "get")) else "change"

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "create_run":
                kwargs = {"start_time": round(1000 * time.time()), **kwargs}
            return self._world.operate(f"{what} {name}", lambda: method(*args, **kwargs))

        return call


@pytest.fixture
def two_starts(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """A run logs four steps and two trials, and a second start of it two steps more.

    Promised: after a start without a fault MLflow has one run, each step and each trial of it once, and its status.
    """
    worlds = itertools.count()
    connect = tracker.connect
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def scenario(world: World) -> None:
        run_dir = tmp_path / str(next(worlds)) / "a"
        run_dir.mkdir(parents=True)
        shutil.copy(empty_store, run_dir.parent / "mlflow.db")
        monkeypatch.setattr(tracker, "connect", lambda uri: _Client(world, connect(uri)))
        trials = [trial("one"), trial("two")]

        def command(steps: range) -> None:
            tracked = start(run_dir)
            with tracked.follow_metrics():
                for step in steps:
                    append(run_dir, row(step, 1.0 / step, gradient_norm=2.0))
                    clock.sleep(3.0)
            tracked.log_trials(list(trials))
            tracked.close("done")

        for name, steps in (("first", range(1, 5)), ("second", range(5, 7)), ("last", range(0))):
            process = world.start(name, lambda steps=steps: command(steps))
            world.run()
        if world.fault is not None and world.fault.process == "last":
            return
        assert process.error is None, process.error
        client = client_of(run_dir)
        (experiment,) = [each for each in client.search_experiments() if each.name == "multihop"]
        runs = client.search_runs([experiment.experiment_id])
        (run,) = [each for each in runs if "mlflow.parentRunId" not in each.data.tags]
        logged = [each["step"] for each in read_rows(run_dir / "metrics.jsonl")]
        for key in ("loss", "gradient_norm"):
            assert history(client, run.info.run_id, key) == [
                (step, 1.0 / step if key == "loss" else 2.0) for step in logged
            ], key
        keys = Counter(each.data.tags["multihop.trial_key"] for each in runs if each is not run)
        assert keys == {"one": 1, "two": 1}, keys
        assert run.info.status == "FINISHED"

    return scenario


@pytest.mark.parametrize(("every", "seed"), every_and_seed(31))
def test_a_run_whose_requests_to_mlflow_fail_anywhere(
    two_starts: Scenario, every: int, seed: int, table: Table
) -> None:
    check_every_failure(two_starts, every, table, seed=seed)


def test_a_run_is_created_twice_if_mlflow_is_not_asked_for_its_token(
    two_starts: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the second start, even without a fault."""
    monkeypatch.setattr(tracker, "search", lambda *_: [])
    with pytest.raises(ValueError, match="too many values to unpack"):
        check_every_failure(two_starts, 1, table, kinds=())
