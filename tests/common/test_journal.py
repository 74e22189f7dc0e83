"""Rows that are passed on through a store."""

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_endpoint import S3

from multihop.common import journal
from multihop.common.journal import JournalReader, JournalWriter
from multihop.common.storage import Folder, open_folder

NAMES = ("metrics.jsonl", "launches.jsonl")
FATES = ("lost", "failed")
STEPS = st.lists(
    st.sampled_from([*NAMES, *NAMES, "flush", "read", "new writer", "new reader", "torn", *FATES]), min_size=20
)


@dataclass
class Unreliable:
    """A folder of which the next write fails, or takes effect and its answer is lost."""

    folder: Folder
    fate: str = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.folder, name)

    def write_atomically(self, name: str, data: bytes) -> None:
        fate, self.fate = self.fate, ""
        if fate != "failed":
            self.folder.write_atomically(name, data)
        if fate:
            raise OSError("connection reset")


@settings(max_examples=100)
@given(STEPS, st.sampled_from([2, 3, 1000]))
def test_each_row_arrives_once_and_in_order(steps: list[str], merged: int) -> None:
    with tempfile.TemporaryDirectory() as place, mock.patch.object(journal, "_MERGED", merged):
        there, here, place_of_rows = Path(place, "there"), Path(place, "here"), Path(place, "rank")
        here.mkdir()
        place_of_rows.mkdir()
        start, written = 1, {name: "" for name in NAMES}
        store: Any = Unreliable(open_folder(str(there)))
        writer = JournalWriter(store, start, place_of_rows, NAMES)
        reader = JournalReader(store, here, NAMES)
        for number, step in enumerate(steps):
            if step in NAMES:
                with open(place_of_rows / step, "a") as file:
                    file.write(f"{number}\n")
                written[step] += f"{number}\n"
            elif step == "torn":
                with open(place_of_rows / NAMES[0], "a") as file:
                    file.write("x")
                written[NAMES[0]] += "x"
            elif step in FATES:
                store.fate = step
            elif step == "flush":
                with suppress(OSError):
                    writer.flush()
            elif step == "read":
                with suppress(OSError):
                    reader.read()
            elif step == "new reader":
                reader = JournalReader(store, here, NAMES)
            else:
                store.fate = ""
                writer.close()
                start = reader.newest_start() + 1
                writer = JournalWriter(store, start, place_of_rows, NAMES)
        with open(place_of_rows / NAMES[0], "a") as file:
            file.write("\n")
        written[NAMES[0]] += "\n"
        store.fate = ""
        writer.close()
        reader.read()
        for name in NAMES:
            assert (here / name).exists() == bool(written[name])
            assert not written[name] or (here / name).read_text() == written[name]


def test_parts_that_a_killed_reader_left_beside_their_merger_are_read_once(tmp_path: Path) -> None:
    there, rank = tmp_path / "there", tmp_path / "rank"
    rank.mkdir()
    writer = JournalWriter(open_folder(str(there)), 1, rank, NAMES)
    for number in range(4):
        with open(rank / NAMES[0], "a") as file:
            file.write(f"{number}\n")
        writer.flush()
    writer.close()
    parts = {path.name: path.read_bytes() for path in there.iterdir()}
    assert len(parts) == 4
    with mock.patch.object(journal, "_MERGED", 4):
        JournalReader(open_folder(str(there)), tmp_path, NAMES).read()
    assert [path.name for path in there.iterdir()] == ["00000001-00000000_00000003.metrics.jsonl"]
    for name, content in parts.items():
        (there / name).write_bytes(content)
    JournalReader(open_folder(str(there)), tmp_path, NAMES).read()
    assert (tmp_path / NAMES[0]).read_text() == "0\n1\n2\n3\n" and len(list(there.iterdir())) == 1


def test_only_what_is_appended_from_now_on_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "rank").mkdir()
    (tmp_path / "rank" / NAMES[0]).write_text("an earlier start's\n")
    writer = JournalWriter(open_folder(str(tmp_path / "there")), 2, tmp_path / "rank", NAMES)
    with open(tmp_path / "rank" / NAMES[0], "a") as file:
        file.write("new\n")
    writer.close()
    JournalReader(open_folder(str(tmp_path / "there")), tmp_path, NAMES).read()
    assert (tmp_path / NAMES[0]).read_text() == "new\n"


def test_a_store_that_fails_for_a_while_loses_nothing(bucket: str, s3: S3, tmp_path: Path) -> None:
    s3.failure = "400 Bad Request"  # which is not tried again by the library
    writer = JournalWriter(open_folder(f"{bucket}/there"), 1, tmp_path, NAMES)
    (tmp_path / NAMES[0]).write_text("one\n")
    s3.failures = 1
    with pytest.raises(OSError):
        for _ in range(100):  # the writer's own thread may meet the failure
            s3.failures = 1
            writer.flush()
            time.sleep(0.01)
            with open(tmp_path / NAMES[0], "a") as file:
                file.write("more\n")
    s3.failures = 0
    writer.close()
    here = tmp_path / "here"
    here.mkdir()
    JournalReader(open_folder(f"{bucket}/there"), here, NAMES).read()
    assert (here / NAMES[0]).read_text() == (tmp_path / NAMES[0]).read_text()
