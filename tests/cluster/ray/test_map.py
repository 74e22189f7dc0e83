"""Functions mapped over items as Ray tasks."""

import os
import signal
from pathlib import Path

import pytest

from cluster.ray.map import WorkerDiedError, map_on_ray

pytestmark = pytest.mark.usefixtures("two_cpus")


def double(number: int) -> int:
    return 2 * number


def die_once(flag: Path) -> int:
    """Kill the worker that runs this, the first time."""
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def die_always(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(sentence: str) -> None:
    raise ValueError(sentence)


def fill_the_disk(path: str) -> None:
    raise OSError(28, "No space left on device", path)


def test_every_item_gives_its_result_once():
    assert sorted(map_on_ray(double, range(50))) == [2 * number for number in range(50)]
    assert list(map_on_ray(double, [])) == []


def test_a_task_whose_worker_is_killed_runs_again(tmp_path):
    pids = list(map_on_ray(die_once, [tmp_path / str(number) for number in range(3)]))
    assert len(pids) == 3 and os.getpid() not in pids


def test_a_task_that_nobody_survives_is_told_in_a_sentence():
    with pytest.raises(WorkerDiedError, match="the worker of item 1 died 4 times, probably out of memory"):
        list(map_on_ray(die_always, [1], "item {}".format))


def test_mistakes_and_a_full_disk_are_told_as_they_are():
    with pytest.raises(ValueError) as caught:
        list(map_on_ray(refuse, ["one sentence", "another"]))
    assert str(caught.value) in {"one sentence", "another"}
    assert type(caught.value) is ValueError
    with pytest.raises(OSError, match="No space left on device") as full:
        list(map_on_ray(fill_the_disk, ["/a"]))
    assert full.value.errno == 28
