"""Ranks that do not start: the output says what they wait for, and quotes Ray's logs."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from workplace import begin, ended, json_lines, make_workplace, multihop, wait_for

from multihop.cluster.ray.session import start_ray
from multihop.cluster.ray.slow_start import TaskStartProbe, ranks_have_processes, why_ranks_wait, why_tasks_wait

PYTHON = "/nowhere/python"


@pytest.fixture
def cannot_start() -> Iterator[None]:
    """A Ray whose processes for this driver do not start."""
    start_ray(num_cpus=1, runtime_env={"py_executable": PYTHON})
    yield
    ray.shutdown()


@ray.remote
class RayTrainWorker:
    """An actor with the name that Ray Train gives to the actor of a rank."""


def test_a_process_that_does_not_start_is_reported_with_the_end_of_rays_logs(cannot_start: None) -> None:
    assert why_ranks_wait(2, None) == "Ray has not placed 2 ranks yet"
    rank = RayTrainWorker.remote()
    deadline = time.monotonic() + 60
    while "raylet.err ends with: " not in (output := why_ranks_wait(1, None)):
        assert not ranks_have_processes() and time.monotonic() < deadline, output
    assert rank and output.startswith("Ray has not started all processes of the 1 ranks: missing on ")
    assert f"{PYTHON}: No such file or directory" in output


def test_waiting_tasks_are_reported_with_requested_and_free_resources(two_cpus: None) -> None:
    assert why_tasks_wait({"CPU": 3, "GPU": 0, "memory": 0}) == (
        "a task needs 3 CPUs, and no node has that much; lower the request, or add a node"
    )
    holder = ray.remote(threading.Event).options(num_cpus=2).remote()
    ray.get(holder.is_set.remote(), timeout=60)
    assert why_tasks_wait({"CPU": 1, "GPU": 0, "memory": 10**6}) == (
        "a task needs 1 CPU and 0.0 GB of memory, and none of the 1 nodes that are large enough has it free; free in "
        f"total: 0 CPUs, {ray.available_resources()['memory'] / 1e9:.1f} GB of memory"
    )
    ray.kill(holder)


def test_the_start_of_a_task_is_detected(two_cpus: None, capsys: pytest.CaptureFixture[str]) -> None:
    probe = TaskStartProbe()
    probe.report({"CPU": 5})
    assert "no task has started for 0 s: a task needs 5 CPUs" in capsys.readouterr().err
    assert probe.poll_interval_s() is not None
    task = ray.remote(probe.wrap(len))
    assert ray.get(task.remote([1, 2]), timeout=60) == 2
    probe.report({"CPU": 5})
    assert probe.poll_interval_s() is None and not capsys.readouterr().err
    probe.close()


@pytest.mark.long
def test_a_run_whose_ranks_do_not_start_reports_why_and_can_be_stopped(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path, texts, "stuck", 10)
    multihop(tmp_path, "prep", "recipe.yaml")
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "slow_start_hook.broken")
    monkeypatch.syspath_prepend(tmp_path)
    hook = f"def broken(found):\n    return {{**(found or {{}}), 'py_executable': {PYTHON!r}}}\n"
    (tmp_path / "slow_start_hook.py").write_text(hook)
    command = begin(tmp_path, "train", "recipe.yaml")
    wait_for(lambda: f"{PYTHON}: No such file" in (tmp_path / "output.txt").read_text(), tmp_path, command)
    command.send_signal(signal.SIGINT)
    assert "no step for 60 s: Ray has not started all processes of the 2 ranks: missing on " in ended(
        tmp_path, command, 75
    )
    assert not json_lines(tmp_path / "runs" / "stuck" / "launches.jsonl")
