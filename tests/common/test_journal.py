"""Rows that are uploaded through a store."""

import resource
import signal
import tempfile
import time
from contextlib import suppress
from cProfile import Profile
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
    with tempfile.TemporaryDirectory() as root, mock.patch.object(journal, "_MERGED", merged):
        remote, local, rank_dir = Path(root, "remote"), Path(root, "local"), Path(root, "rank")
        local.mkdir()
        rank_dir.mkdir()
        launch, written = 1, {name: "" for name in NAMES}
        store: Any = Unreliable(open_folder(str(remote)))
        writer = JournalWriter(store, launch, rank_dir, NAMES)
        reader = JournalReader(store, local, NAMES)
        for number, step in enumerate(steps):
            if step in NAMES:
                with open(rank_dir / step, "a") as file:
                    file.write(f"{number}\n")
                written[step] += f"{number}\n"
            elif step == "torn":
                with open(rank_dir / NAMES[0], "a") as file:
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
                reader = JournalReader(store, local, NAMES)
            else:
                store.fate = ""
                writer.close()
                launch = reader.newest_launch() + 1
                writer = JournalWriter(store, launch, rank_dir, NAMES)
        with open(rank_dir / NAMES[0], "a") as file:
            file.write("\n")
        written[NAMES[0]] += "\n"
        store.fate = ""
        writer.close()
        reader.read()
        for name in NAMES:
            assert (local / name).exists() == bool(written[name])
            assert not written[name] or (local / name).read_text() == written[name]


def test_segments_that_a_killed_reader_left_beside_their_merger_are_read_once(tmp_path: Path) -> None:
    remote, rank = tmp_path / "remote", tmp_path / "rank"
    rank.mkdir()
    writer = JournalWriter(open_folder(str(remote)), 1, rank, NAMES)
    for number in range(4):
        with open(rank / NAMES[0], "a") as file:
            file.write(f"{number}\n")
        writer.flush()
    writer.close()
    segments = {path.name: path.read_bytes() for path in remote.iterdir()}
    assert len(segments) == 4
    with mock.patch.object(journal, "_MERGED", 4):
        JournalReader(open_folder(str(remote)), tmp_path, NAMES).read()
    assert [path.name for path in remote.iterdir()] == ["00000001-00000000_00000003.metrics.jsonl"]
    for name, content in segments.items():
        (remote / name).write_bytes(content)
    JournalReader(open_folder(str(remote)), tmp_path, NAMES).read()
    assert (tmp_path / NAMES[0]).read_text() == "0\n1\n2\n3\n" and len(list(remote.iterdir())) == 1


def test_a_poll_of_a_long_journal_does_not_compare_each_segment_with_each(tmp_path: Path) -> None:
    def calls_of_a_poll(merged: int) -> int:
        remote, local = tmp_path / f"remote{merged}", tmp_path / f"local{merged}"
        remote.mkdir()
        local.mkdir()
        for first in range(0, 10 * merged, 10):
            (remote / f"00000001-{first:08d}_{first + 9:08d}.metrics.jsonl").write_text("{}\n" * 10)
        reader = JournalReader(open_folder(str(remote)), local, NAMES)
        reader.read()
        assert (local / "metrics.jsonl").read_text() == "{}\n" * 10 * merged
        profile = Profile()
        profile.runcall(reader.read)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls_of_a_poll(160) < 20 * calls_of_a_poll(16)


def test_a_full_disk_leaves_no_part_of_a_segment(tmp_path: Path) -> None:
    (tmp_path / "rank").mkdir()
    (tmp_path / "local").mkdir()
    rows = "".join(f"{number:08d}\n" for number in range(1000))
    writer = JournalWriter(open_folder(str(tmp_path / "remote")), 1, tmp_path / "rank", NAMES)
    (tmp_path / "rank" / NAMES[0]).write_text(rows)
    writer.close()
    reader = JournalReader(open_folder(str(tmp_path / "remote")), tmp_path / "local", NAMES)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError):
                reader.read()
            assert (tmp_path / "local" / NAMES[0]).stat().st_size == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    reader.read()
    assert (tmp_path / "local" / NAMES[0]).read_text() == rows


def test_only_what_is_appended_from_now_on_is_uploaded(tmp_path: Path) -> None:
    (tmp_path / "rank").mkdir()
    (tmp_path / "rank" / NAMES[0]).write_text("an earlier launch's\n")
    writer = JournalWriter(open_folder(str(tmp_path / "remote")), 2, tmp_path / "rank", NAMES)
    with open(tmp_path / "rank" / NAMES[0], "a") as file:
        file.write("new\n")
    writer.close()
    JournalReader(open_folder(str(tmp_path / "remote")), tmp_path, NAMES).read()
    assert (tmp_path / NAMES[0]).read_text() == "new\n"


def test_a_store_that_fails_for_a_while_loses_nothing(bucket: str, s3: S3, tmp_path: Path) -> None:
    s3.failure = "400 Bad Request"  # which is not tried again by the library
    writer = JournalWriter(open_folder(f"{bucket}/remote"), 1, tmp_path, NAMES)
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
    local = tmp_path / "local"
    local.mkdir()
    JournalReader(open_folder(f"{bucket}/remote"), local, NAMES).read()
    assert (local / NAMES[0]).read_text() == (tmp_path / NAMES[0]).read_text()
