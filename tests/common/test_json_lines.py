"""results.jsonl survives crashes: a row is there whole or not at all."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.json_lines import append_row, read_rows

ROWS = [{"task": "a", "value": 0.5}, {"task": "b", "note": "line\nbreak £"}, {"task": "c", "value": None}]


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "results.jsonl"
    assert read_rows(path) == []
    for row in ROWS:
        append_row(path, row)
    assert read_rows(path) == ROWS
    assert len(path.read_bytes().splitlines()) == len(ROWS)


@given(lost=st.integers(1, 60))
def test_a_torn_last_line_is_passed_over_and_healed(tmp_path_factory: pytest.TempPathFactory, lost: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "results.jsonl"
    for row in ROWS:
        append_row(path, row)
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    kept = read_rows(path)
    assert kept == ROWS[: whole[:-lost].count(b"\n")]
    append_row(path, {"task": "d"})
    assert read_rows(path) == [*kept, {"task": "d"}]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("line", ["{'task': 1}", "[1]", ""])
def test_a_complete_line_that_is_no_row_is_skipped_and_named(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"task": "a"}}\n{line}\n{{"task": "b"}}\n')
    assert read_rows(path) == [{"task": "a"}, {"task": "b"}]
    (record,) = caplog.records
    assert str(path) in record.message and "not a JSON object" in record.message


def test_a_number_that_json_does_not_know_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        append_row(tmp_path / "results.jsonl", {"value": float("nan")})
    assert read_rows(tmp_path / "results.jsonl") == []
