"""Two users who submit the same run at once, and fetch its results."""

import itertools
import json
from pathlib import Path

import pytest
from simulation.disk import SimulatedDisk
from simulation.every_failure import Scenario, check_every_failure, every_and_seed
from simulation.head import SimulatedHead
from simulation.world import Process, World
from tables_of_tests import Table

from multihop.cluster.jobs import submit as submission
from multihop.cluster.jobs.results import fetch_results, find_job
from multihop.cluster.jobs.submit import JobRequest, load_for_cluster, submit
from multihop.cluster.ray.jobs import Job, UnreachableError
from multihop.cluster.runs.code_version import CodeVersion
from multihop.common import files

_RECIPE = """
name: a
data: {sources: [{path: /texts}]}
model: {preset: bert-mini}
phases: [{seq_len: 128, global_batch_size: 8, steps: 10, lr: 1.0e-3}]
"""
_FILES = {"recipe.json": "{}", "summary.json": '{"status": "done"}', "eval/results.jsonl": '{"key": "one"}\n'}


@pytest.fixture
def two_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Both submit, and wait for the job to end; one fetches the results, over those of an earlier fetch.

    Promised: never two jobs of one run at a time; a job that was acknowledged is there; and fetched results are whole.
    """
    worlds = itertools.count()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(_RECIPE)
    monkeypatch.setattr(submission, "code_version", lambda: CodeVersion(tmp_path, "commit", False))
    monkeypatch.setattr(submission, "code_hash", lambda package: "same")

    def scenario(world: World) -> None:
        root = tmp_path / str(next(worlds))
        head, runs, out = SimulatedHead(world), root / "cluster" / "runs", root / "user" / "fetched"
        request = JobRequest(load_for_cluster(recipe, [], str(runs)), None, str(runs), ())
        for folder, content in ((runs / "a", _FILES), (out, {name: "old" for name in (*_FILES, "report.md")})):
            for name, text in content.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        (runs / "a" / "recipe.json").write_text(json.dumps(request.recipe.model_dump(mode="json")))

        def user() -> Job:
            for _ in range(9):
                try:
                    return submit(head.connection(), request, lambda line: None)
                except (UnreachableError, OSError):
                    continue
            raise AssertionError("the cluster was not reached in ten minutes")

        def fetch() -> None:
            jobs = head.connection()
            fetch_results(jobs, find_job(jobs, "a"), out)

        disk = SimulatedDisk(world, root / "user")

        def check_fetched(process: Process) -> None:
            """Whole after a fetch that ended well, also if power is cut then."""
            assert process.error is None, process.error
            disk.cut_power()
            found = {path.relative_to(out).as_posix(): path.read_text() for path in out.rglob("*") if path.is_file()}
            assert found == {name: (runs / "a" / name).read_text() for name in _FILES}, found

        with disk.mounted():
            users = [world.start(name, user) for name in ("first", "second")]
            world.run()
            for each in users:
                assert each.result is None or head.jobs[each.result.id].metadata["multihop.run"] == "a"
            of_run = sorted((job for job in head.jobs.values() if len(job.metadata) > 1), key=lambda job: job.started)
            for before, after in itertools.pairwise(of_run):
                assert before.ends <= after.started, f"{before.submission_id} and {after.submission_id} ran at once"
            for name in ("fetch", "again"):
                fetched = world.start(name, fetch)
                world.run()
                if fetched.error is None or world.fault is None or world.fault.process != name:
                    check_fetched(fetched)

    return scenario


@pytest.mark.parametrize(("every", "seed"), every_and_seed(19))
def test_submitting_and_fetching_that_fail_anywhere(two_users: Scenario, every: int, seed: int, table: Table) -> None:
    check_every_failure(two_users, every, table, seed=seed)


def test_two_jobs_run_at_once_if_a_running_one_is_taken_for_an_ended_one(
    two_users: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "has_ended", property(lambda _: True))
    with pytest.raises(AssertionError, match="ran at once"):
        check_every_failure(two_users, 1, table, kinds=())


@pytest.mark.long
def test_fetched_results_are_lost_if_nothing_is_synced(
    two_users: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "sync", lambda path: None)
    with pytest.raises(AssertionError):
        check_every_failure(two_users, 1, table, kinds=("cut",))
