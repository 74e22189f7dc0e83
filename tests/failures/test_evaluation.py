"""An evaluation on a disk: a driver, and a process for each trial. As with Ray on two CPUs, two trials run at once, and
those that are left when their driver dies end after it."""

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from simulation.disk import SimulatedDisk
from simulation.every_failure import Scenario, check_every_failure, every_and_seed
from simulation.world import Killed, Process, World
from tables_of_tests import Table

from multihop.cluster.ray import WorkerDiedError
from multihop.cluster.ray.map import RETRIES
from multihop.cluster.runs import trials as runs_trials
from multihop.cluster.runs.evaluation import weights_dir
from multihop.cluster.runs.trials import run_missing_trials
from multihop.common import clock, files
from multihop.common.json_lines import Row, read_rows
from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.config import EvalConfig
from multihop.eval.model.model_under_test import of_run
from multihop.eval.tasks.known_tasks import open_tasks
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.plan_file import RESULTS, read_results
from multihop.eval.trials.trial import Trial
from multihop.pretrain.models.families import parse_model_config

_CPUS = 2


def simulated_map(world: World) -> Callable[..., Iterator[Any]]:
    """Return a replacement for `map_on_ray`: a simulated process for each item, tried again as Ray does if it is
    killed, and ended if its driver fails."""

    def mapped(
        function: Callable[[Any], Any],
        items: Sequence[Any],
        what: Callable[[Any], str],
        resources: object,
        on_death: Callable[[Any, WorkerDiedError], Any],
    ) -> Iterator[Any]:
        driver = world.process()
        assert driver is not None
        left = deque((item, 1) for item in items)
        running: dict[str, tuple[Process, Any, int]] = {}
        try:
            while left or running:
                while left and len(running) < _CPUS:
                    item, attempt = left.popleft()
                    number = sum(process.name.startswith("worker") for process in world.processes)

                    def work(item: Any = item, seconds: float = 2.5 * (number % 4 == 1)) -> Any:
                        clock.sleep(seconds)  # of some workers, so that others end meanwhile
                        return function(item)

                    worker = world.start(f"worker {number}", work, driver)
                    running[worker.name] = worker, item, attempt
                clock.sleep(1.0)
                for name in [name for name, (worker, _, _) in running.items() if worker.is_dead]:
                    worker, item, attempt = running.pop(name)
                    if worker.error is None:
                        yield worker.result
                        continue
                    assert isinstance(worker.error, Killed), worker.error
                    if attempt <= RETRIES:
                        left.append((item, attempt + 1))
                    else:
                        yield on_death(item, WorkerDiedError(what(item)))
        finally:
            if not driver.is_dead:
                for worker, _, _ in running.values():
                    worker.is_dead = True

    return mapped


@pytest.fixture
def evaluated(bert_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """A task with two settings, and one that starts from the weights of the better one: evaluated twice, the second
    time with another seed in addition.

    Promised: a trial that was reported has its row, and the predictions of that row; in the end there are all rows,
    with the scores of an evaluation without a fault, and no weights.
    """
    words = ("river", "stone", "letter", "garden")
    for name in ("large", "small"):
        rows = "".join(f"{words[i % 4]} {i},{i % 2}\n" for i in range(24))
        (tmp_path / f"{name}.csv").write_text(f"what,how\n{rows}")
        task_yaml = f"kind: classification\ntrain: {name}.csv\nfields: {{text: what, label: how}}\n"
        (tmp_path / f"{name}.yaml").write_text(task_yaml)
    large, small = str(tmp_path / "large.yaml"), str(tmp_path / "small.yaml")
    model = parse_model_config({"family": "bert", "layers": 1, "hidden": 8, "heads": 1, "max_positions": 32})
    manifest = open_dataset(bert_data).manifest
    worlds = itertools.count()

    def trials_of(seeds: list[int], run: Path) -> tuple[EvalConfig, list[Trial]]:
        tasks = [{"name": small, "start_from": large}, {"name": large, "lr": [1e-3, 2e-3]}]
        common = {"seeds": seeds, "lr": [1e-3], "batch_size": 16, "epochs": 1, "inits": ["random"], "cpus": 1}
        config = EvalConfig.model_validate({"tasks": tasks, **common})
        tested = of_run(model, str(run), "c", 7, bert_data, manifest)
        return config, plan_trials(config, open_tasks(config), tested, weights_dir(run / RESULTS))

    def without_seconds(rows: Sequence[Row]) -> list[Row]:
        return [{**row, "seconds": 0} for row in rows]

    expected: list[Row] = []

    def scenario(world: World) -> None:
        root = tmp_path / str(next(worlds))
        root.mkdir()
        results = root / RESULTS
        reported: list[Row] = []

        def evaluate(seeds: list[int]) -> int:
            config, trials = trials_of(seeds, root)
            return run_missing_trials(trials, config, results, lambda row: reported.append(json.loads(json.dumps(row))))

        def check() -> None:
            rows = read_rows(results)
            for row in reported:
                assert row in rows, f"{row['key']} was reported and is not there"
            for row in rows:
                if row["status"] == "ok":
                    predictions = (results.parent / "predictions" / f"{row['key']}.json").read_bytes()
                    assert hashlib.sha256(predictions).hexdigest() == row["predictions_sha256"]

        monkeypatch.setattr(runs_trials, "map_on_ray", simulated_map(world))
        with SimulatedDisk(world, root).mounted():
            for name, seeds in (("first", [0]), ("second", [0, 1])):
                had_happened = world.happened
                process = world.start(name, lambda seeds=seeds: evaluate(seeds))
                world.run()
                check()
                if world.happened == had_happened:
                    assert process.error is None and process.result == 0
            if world.fault:  # what was left to do
                last = world.start("last", lambda: evaluate([0, 1]))
                world.run()
                check()
                assert last.result == 0
        workers = [process for process in world.processes if process.name.startswith("worker")]
        assert world.fault or len(workers) == len(read_rows(results)) == 6, "no trial runs twice"
        found = read_results(root)
        assert not found.unfinished and all(row["status"] == "ok" for row in found.rows)
        if not expected:
            expected.extend(without_seconds(found.rows))
        assert without_seconds(found.rows) == expected
        assert not list(weights_dir(results).iterdir())
        assert not [path for path in root.rglob("*") if path.name.endswith(".tmp")]

    return scenario


@pytest.mark.parametrize(("every", "seed"), every_and_seed(47))
def test_an_evaluation_that_fails_anywhere(evaluated: Scenario, every: int, seed: int, table: Table) -> None:
    check_every_failure(evaluated, every, table, seed=seed)


@pytest.mark.long
def test_trials_without_a_driver_leave_temporaries_if_the_next_one_does_not_remove_them(
    evaluated: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_trials, "remove_temporaries", lambda folder: None)
    with pytest.raises(AssertionError, match=r"kind='orphan'\) at 'unlink eval/weights/"):
        check_every_failure(evaluated, 1, table, kinds=("orphan",))


def test_predictions_are_lost_if_their_folder_is_not_synced(
    evaluated: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "sync", lambda path: None)
    with pytest.raises(AssertionError, match=r"(?s)faults broke a promise:\nFault\(.*kind='cut'\).*predictions"):
        check_every_failure(evaluated, 5, table, ["cut"])
