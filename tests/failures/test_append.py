"""Rows of a file on a disk, as of metrics and of finished trials."""

import itertools
from pathlib import Path

import pytest
from simulation.disk import SimulatedDisk
from simulation.every_failure import Scenario, check_every_failure
from simulation.world import World
from tables_of_tests import Table

from multihop.common import files
from multihop.common.json_lines import append_row, read_rows


@pytest.fixture
def appended(tmp_path: Path) -> Scenario:
    """A process appends rows, and one after it more.

    Promised: a row that was appended without an error is there, once, in order, and no row that is half a row.
    """
    worlds = itertools.count()

    def scenario(world: World) -> None:
        root = tmp_path / str(next(worlds))
        root.mkdir()
        acknowledged: list[int] = []

        def process(first: int) -> None:
            for number in range(first, first + 3):
                try:
                    append_row(root / "eval" / "results.jsonl", {"trial": number, "text": "x" * 50})
                    acknowledged.append(number)
                except OSError:
                    pass

        with SimulatedDisk(world, root).mounted():
            for first in (0, 10):
                world.start(f"from {first}", lambda first=first: process(first))
                world.run()
            path = root / "eval" / "results.jsonl"
            rows = [row["trial"] for row in read_rows(path)]
            written = {10, 11, 12} if world.fault is None or world.fault.process == "from 0" else set()
            assert written | set(acknowledged) <= set(rows) and rows == sorted(set(rows)), f"{rows} of {acknowledged}"

    return scenario


def test_rows_whose_writer_fails_anywhere(appended: Scenario, table: Table) -> None:
    check_every_failure(appended, 1, table)


def test_rows_are_lost_if_the_folder_of_their_file_is_not_synced(
    appended: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "sync", lambda path: None)
    with pytest.raises(AssertionError, match=r"faults broke a promise:\nFault\(.*kind='cut'\)"):
        check_every_failure(appended, 1, table)
