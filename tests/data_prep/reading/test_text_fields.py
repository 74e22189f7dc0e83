"""Text fields are recognized from the first rows of files of every format."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from multihop.data_prep.config import Source
from multihop.data_prep.reading.sources import list_files
from multihop.data_prep.reading.text_fields import some_texts, text_fields

ROWS = [
    {"id": f"a-{number}", "url": "https://a/b", "title": "of four short words", "body": "one two three " * 20, "n": 1}
    for number in range(10)
]


def fields_of(path: Path) -> dict[str, float]:
    return text_fields(list_files([Source(path=str(path))]))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow"])
def test_fields_with_text_are_distinguished_from_ids_addresses_and_numbers(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    table = pa.Table.from_pylist(ROWS)
    if name == "a.parquet":
        pq.write_table(table, path)
    elif name == "a.arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        content = (json.dumps(ROWS) if name == "a.json" else "".join(json.dumps(row) + "\n" for row in ROWS)).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert fields_of(path) == {"body": 280.0, "title": 19.0}


def test_a_script_without_spaces_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "漢字", "text": "春眠暁を覚えず処処啼鳥を聞く"}))
    assert list(fields_of(tmp_path)) == ["text"]


def test_a_field_of_few_rows_is_none_and_broken_rows_are_passed_over(tmp_path: Path) -> None:
    rows = [json.dumps({"text": "one two three"}), "{broken", json.dumps({"note": "one two three"}), "[1]", "7"]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, json.dumps({"text": "four five six", "object": {"a": {}}})]))
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    assert fields_of(tmp_path) == {"text": 13.0}
    assert list(some_texts(list_files([Source(path=str(tmp_path))]))) == ["one two three", "four five six"]


def test_text_files_have_no_fields(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    assert fields_of(tmp_path) == {}
