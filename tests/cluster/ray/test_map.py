"""Functions mapped over items as Ray tasks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from multihop.cluster import interrupts
from multihop.cluster.ray import WorkerDiedError
from multihop.cluster.ray.map import map_on_ray
from multihop.common.errors import UserError
from multihop.common.files import atomic_replace

pytestmark = pytest.mark.usefixtures("two_cpus")


def double(number: int) -> int:
    return 2 * number


def die_once(flag: Path) -> int:
    """Kill the worker that runs this the first time."""
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def die_always(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(sentence: str) -> None:
    raise UserError(sentence)


def fill_the_disk(path: str) -> None:
    raise OSError(28, "No space left on device", path)


def call(given: tuple[Callable[[Any], Any], Any]) -> Any:
    function, item = given
    return function(item)


def write_slowly(location: tuple[Path, str]) -> None:
    folder, name = location
    with atomic_replace(folder / name) as temporary:
        temporary.touch()
        for _ in range(10_000):  # Ray interrupts between two instructions, not in one that waits
            time.sleep(0.01)


def stay(folder: Path) -> None:
    """Run forever, and ignore interruptions."""
    (folder / str(os.getpid())).touch()
    while True:
        with suppress(KeyboardInterrupt):
            time.sleep(120)


def test_every_item_gives_its_result_once():
    assert sorted(map_on_ray(double, range(50))) == [2 * number for number in range(50)]
    assert list(map_on_ray(double, [])) == []


def test_a_task_whose_worker_is_killed_runs_again(tmp_path):
    pids = list(map_on_ray(die_once, [tmp_path / str(number) for number in range(3)]))
    assert len(pids) == 3 and os.getpid() not in pids


def test_a_task_that_nobody_survives_is_reported_in_a_sentence():
    with pytest.raises(WorkerDiedError, match="the worker of item 1 died 4 times, probably out of memory"):
        list(map_on_ray(die_always, [1], "item {}".format))


def test_mistakes_and_a_full_disk_are_reported_as_they_are():
    with pytest.raises(UserError) as caught:
        list(map_on_ray(refuse, ["one sentence", "another"]))
    assert str(caught.value) in {"one sentence", "another"}
    assert type(caught.value) is UserError
    with pytest.raises(OSError, match="No space left on device") as full:
        list(map_on_ray(fill_the_disk, ["/a"]))
    assert full.value.errno == 28


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended_early(function: Callable[[Any], None], items: list[Any], begun: Callable[[], object]) -> None:
    """Take the result of the first item, and close the iterator when the others have begun."""
    results = map_on_ray(call, [(double, 1), *((function, item) for item in items)])
    assert next(results) == 2
    wait_for(begun)
    results.close()


def test_tasks_that_nobody_waits_for_remove_their_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihop.cluster.ray.map._ENDS_S", 60.0)  # on a busy machine an interruption may arrive late
    ended_early(write_slowly, [(tmp_path, "a"), (tmp_path, "b")], lambda: len(list(tmp_path.glob(".*.tmp"))) == 2)
    wait_for(lambda: not list(tmp_path.iterdir()))  # Ray may call a task cancelled before its worker is interrupted


def test_tasks_that_nobody_waits_for_and_that_do_not_end_are_killed(tmp_path: Path) -> None:
    ended_early(stay, [tmp_path], lambda: list(tmp_path.iterdir()))
    (process,) = tmp_path.iterdir()
    wait_for(lambda: not psutil.pid_exists(int(process.name)))


def test_an_interrupt_that_is_lost_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_received", [])
    before = signal.getsignal(signal.SIGTERM)
    interrupts.interrupt_on_signals()
    try:
        results = map_on_ray(double, range(9))
        assert next(results) % 2 == 0
        with suppress(KeyboardInterrupt):  # as C code may do
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        with pytest.raises(KeyboardInterrupt):
            list(results)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.long
def test_tasks_interrupted_at_any_moment_do_not_end_the_driver() -> None:
    """Ray's driver exits if it cancels a task whose result arrives: without waiting for that, after 5 to 21 rounds."""
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "support.interrupt_tasks", "25"],
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent / 'src'}"},
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout) == (0, "25\n"), done.stderr[-2000:]
