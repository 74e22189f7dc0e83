"""Rows on their way from a rank's node to the driver's, through a bucket."""

import itertools
from contextlib import suppress
from pathlib import Path

import pytest
from simulation.bucket import SimulatedBucket
from simulation.every_failure import Scenario, check_every_failure, every_and_seed
from simulation.world import World
from tables_of_tests import Table

from multihop.common import clock, journal, storage
from multihop.common.journal import JournalReader, JournalWriter
from multihop.common.json_lines import append_row, read_rows
from multihop.common.storage import open_folder

_NAMES = ("metrics.jsonl",)


@pytest.fixture
def two_launches_and_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Each launch logs five rows on a new node; a driver reads them, and another one a minute after it failed.

    Promised: rows that a launch flushed without an error are read, each row once, those of a launch in their order.
    """
    worlds = itertools.count()
    monkeypatch.setattr(journal, "_MERGED", 3)

    def scenario(world: World) -> None:
        bucket, root = SimulatedBucket(world), tmp_path / str(next(worlds))
        monkeypatch.setattr(storage, "connect", lambda *_: bucket)
        acknowledged = list[list[int]]()
        stopped = False

        def launch(number: int) -> None:
            folder = root / f"launch-{number}"
            folder.mkdir(parents=True)
            writer = JournalWriter(open_folder("s3://bucket/run/journal"), number, folder, _NAMES)
            for step in range(5):
                append_row(folder / _NAMES[0], {"row": [number, step]})
                clock.sleep(1.3)
            for _ in range(100):
                try:
                    writer.close()
                    break
                except OSError:
                    clock.sleep(3.0)
            else:
                return
            acknowledged.extend([number, step] for step in range(5))

        def driver(name: str) -> None:
            (root / name).mkdir(parents=True)
            reader = JournalReader(open_folder("s3://bucket/run/journal"), root / name, _NAMES)
            while not stopped:
                with suppress(OSError):
                    reader.read()
                clock.sleep(2.0)
            reader.read()

        def rows_of(name: str) -> list[list[int]]:
            rows = [row["row"] for row in read_rows(root / name / _NAMES[0])]
            for number in (1, 2):
                steps = [step for each, step in rows if each == number]
                assert steps == sorted(set(steps)), f"{name} read {rows}"
            assert all(row in rows for row in acknowledged), f"{name} read {rows}, and {acknowledged} were written"
            return rows

        drivers = [world.start("driver", lambda: driver("driver"))]
        for number in (1, 2):
            process = world.start(f"launch {number}", lambda number=number: launch(number))
            deadline = world.time + 60.0
            world.run(lambda deadline=deadline, process=process: process.is_dead or world.time > deadline)
            if drivers[-1].is_dead or drivers[-1].suspended_until > world.time:
                drivers.append(world.start(f"driver {number}", lambda number=number: driver(f"driver {number}")))
        end = world.time + 200.0
        world.run(lambda: world.time > end)
        stopped = True
        world.run()
        for each in drivers:
            if each.error is None:
                rows_of(each.name)
        world.start("last", lambda: driver("last"))
        world.run()
        if world.fault is None or world.fault.process != "last":
            rows = rows_of("last")
            assert rows == sorted(rows)

    return scenario


@pytest.mark.parametrize(("every", "seed"), every_and_seed(37))
def test_a_journal_whose_writers_and_readers_fail_anywhere(
    two_launches_and_a_driver: Scenario, every: int, seed: int, table: Table
) -> None:
    check_every_failure(two_launches_and_a_driver, every, table, seed=seed)


@pytest.mark.long
def test_rows_are_lost_if_a_segment_changes_after_a_lost_response(
    two_launches_and_a_driver: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written, and maybe read: written again with later rows, a reader would not see them."""
    monkeypatch.setattr(JournalWriter, "_unanswered", property(lambda _: None, lambda *_: None), raising=False)
    with pytest.raises(AssertionError, match=r"kind='lost'\).*were written"):
        check_every_failure(two_launches_and_a_driver, 1, table, kinds=("lost",))
