"""Following a file of rows that a restart cuts and another process writes to."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.files import truncate_torn_line
from multihop.common.json_lines import RowFollower, append_row


def line(step: int) -> bytes:
    return json.dumps({"step": step, "note": "£" * step}, ensure_ascii=False).encode() + b"\n"


def steps(follower: RowFollower) -> list[int]:
    return [row["step"] for row in follower.read()]


@given(whole=st.integers(0, 3), torn=st.integers(0, 300), size=st.sampled_from([0, 100_000]))
def test_from_the_end_on_is_from_the_first_line_that_is_not_whole(
    tmp_path_factory: pytest.TempPathFactory, whole: int, torn: int, size: int
) -> None:
    """Wherever a power cut tore the last line, also where the whole ones are far from the end."""
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    half = (b"\0" * size + line(90))[:-1][: size + torn]
    path.write_bytes(b"".join(map(line, range(whole))) + half)
    follower = RowFollower(path, from_end=True)
    assert steps(follower) == []
    truncate_torn_line(path)
    assert path.read_bytes() == b"".join(map(line, range(whole)))
    append_row(path, {"step": 7})
    assert steps(follower) == [7]
    append_row(path, {"step": 8})
    assert steps(follower) == [8] and steps(follower) == []


def test_a_row_is_given_once_its_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = RowFollower(path)
    assert steps(follower) == []
    with open(path, "ab", buffering=0) as file:
        file.write(line(1) + line(2)[:5])
        assert steps(follower) == [1]
        file.write(line(2)[5:])
        assert steps(follower) == [2]


@pytest.mark.parametrize("left", [0, 1])
def test_a_file_that_lost_rows_is_read_from_its_start(tmp_path: Path, left: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2))
    follower = RowFollower(path)
    assert steps(follower) == [1, 2]
    path.write_bytes(line(1)[: left * 100])
    assert steps(follower) == [1] * left
    append_row(path, {"step": 3})
    assert steps(follower) == [3]


def test_a_whole_line_that_is_no_row_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + b"[" * 100_000 + b"\n" + b"5\n\n" + line(2))
    with caplog.at_level(logging.WARNING):
        assert steps(RowFollower(path)) == [1, 2]
    assert [record.message.split(": ")[0] for record in caplog.records] == [str(path)] * 3
