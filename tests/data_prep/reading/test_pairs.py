"""Pairs are read from every format, whole or in parts; a bad pair or a bad file is set aside with its reason."""

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up_pairs import FIELDS, pair
from one_file import fails

from multihop.common.errors import UserError
from multihop.data_prep.config import Source
from multihop.data_prep.reading import identities
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import FileRange, group_into_splits, list_files

PAIRS = [pair(number) for number in range(40)]
COLUMNS = {"en": [source for source, _ in PAIRS], "es": [target for _, target in PAIRS]}


def read(path: Path, split_bytes: int | None = None, **source: Any) -> list[Any]:
    if not source and not path.name.endswith((".tsv", ".tsv.gz")):
        source = {"fields": FIELDS}
    files = list_files([Source.model_validate({"path": str(path), **source})])
    return [item for split in group_into_splits(files, split_bytes) for part in split for item in read_range(part)]


def whole(path: Path, target: Path) -> FileRange:
    files = list_files([Source(path=str(path), target_path=str(target))])
    hashes = identities.hash_files([files[0], files[0].target]) if files[0].target is not None else {}
    (file,) = identities.with_identities(files, hashes)
    return FileRange(file, 0, file.size)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_every_format_holds_the_same_pairs(tmp_path: Path) -> None:
    rows = [{"en": source, "id": 7, "es": target} for source, target in PAIRS]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table = pa.table({"es": COLUMNS["es"], "more": list(range(40)), "en": COLUMNS["en"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=9)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow", "b.arrow"):
        assert read(tmp_path / name) == PAIRS, name
        swapped = read(tmp_path / name, fields={"source": "es", "target": "en"})
        assert swapped == [(target, source) for source, target in PAIRS], name
    write_lines(tmp_path / "a.tsv", [f"{source}\t{target}" for source, target in PAIRS])
    write_lines(tmp_path / "b.tsv", [f"0.5\t{target}\tx\t{source}" for source, target in PAIRS])
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    assert read(tmp_path / "a.tsv") == read(tmp_path / "a.tsv.gz") == PAIRS
    assert read(tmp_path / "b.tsv", fields={"source": 4, "target": 2}) == PAIRS
    assert read(tmp_path, fields={"source": 1, "target": 2}) != [], "a folder gives its .tsv files alone"
    for packing, pack in (("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)):
        for side in ("en", "es"):
            content = "\n".join(COLUMNS[side]).encode()  # the last line without its end
            (tmp_path / f"a.{side}{packing}").write_bytes(pack(content))
        assert read(tmp_path / f"a.en{packing}", target_path=str(tmp_path / f"a.es{packing}")) == PAIRS
    assert read(tmp_path / "a.en", target_path=str(tmp_path / "a.es.gz")) == PAIRS


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3_000), st.sampled_from(["a.tsv", "a.jsonl", "a.en"]))
def test_however_the_input_is_cut_each_pair_is_read_once(tmp_path: Path, split_bytes: int, name: str) -> None:
    if name == "a.tsv":
        write_lines(tmp_path / name, [f"{source}\t{target}" for source, target in PAIRS])
        assert read(tmp_path / name, split_bytes) == PAIRS
    elif name == "a.jsonl":
        (tmp_path / name).write_bytes(jsonl([{"en": source, "es": target} for source, target in PAIRS]))
        assert read(tmp_path / name, split_bytes) == PAIRS
    else:
        paths = [write_lines(tmp_path / f"a.{side}", COLUMNS[side]) for side in ("en", "es")]
        assert read(paths[0], split_bytes, target_path=str(paths[1])) == PAIRS


BAD_ROWS: list[tuple[bytes, str]] = [
    (b'{"en": "one"}', "no field 'es'"),
    (b'{"es": "uno"}', "no field 'en'"),
    (b'{"en": "one", "es": null}', "field 'es' is not text"),
    (b'{"en": ["one"], "es": "uno"}', "field 'en' is not text"),
    (b'{"en": "one", "es": "u', "broken JSON"),
    (b'["one", "uno"]', "no field 'en'"),
    (b'{"en": "one", "es": "\xff"}', "not UTF-8"),
    (b"", "empty"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_ROWS)
def test_a_bad_row_is_set_aside_alone(tmp_path: Path, line: bytes, reason: str) -> None:
    good = b'{"en": "two", "es": "dos"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + line + b"\n" + good)
    assert read(tmp_path / "a.jsonl") == [("two", "dos"), BadDocument(2, reason), ("two", "dos")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"one", "1 columns, the first line has 2"),
        (b"one\tuno\teins", "3 columns, the first line has 2"),
        (b"one\tu\xffo", "not UTF-8"),
        (b"one\tu\0o", "NUL bytes"),
        (b"", "empty"),
    ],
)
def test_a_bad_line_of_columns_is_set_aside_alone_in_whatever_part_it_is(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    (tmp_path / "a.tsv").write_bytes(b"\xef\xbb\xbftwo\tdos\r\n" + line + b"\n\tdos\n")
    assert read(tmp_path / "a.tsv") == [("two", "dos\r"), BadDocument(2, reason), ("", "dos")]
    assert next(item for item in read(tmp_path / "a.tsv", 4) if isinstance(item, BadDocument)).reason == reason


def test_tables_lack_a_column_or_have_nulls(tmp_path: Path) -> None:
    pq.write_table(pa.table({"en": ["one", None], "es": ["uno", "dos"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [("one", "uno"), BadDocument(2, "field 'en' is not text")]
    pq.write_table(pa.table({"en": ["one"], "es": [1]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"en": ["one"]}), tmp_path / "c.parquet")
    for name, reason in (("b", "field 'es' is not text"), ("c", "no field 'es'")):
        (file,) = list_files([Source.model_validate({"path": str(tmp_path / f"{name}.parquet"), "fields": FIELDS})])
        assert fails(FileRange(file, 0, file.size)) == reason


def test_a_file_without_the_column_is_refused_whole(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.tsv", ["one\tuno"])
    source = {"path": str(tmp_path / "a.tsv"), "fields": {"source": 1, "target": 3}}
    (file,) = list_files([Source.model_validate(source)])
    assert fails(FileRange(file, 0, file.size)) == "no column 3; its first line has 2"
    (tmp_path / "a.tsv").write_bytes(b"")
    assert read(tmp_path / "a.tsv") == []


def test_line_files_of_different_lengths_are_refused_with_both(tmp_path: Path) -> None:
    paths = write_lines(tmp_path / "a.en", COLUMNS["en"] * 50), write_lines(tmp_path / "a.es", COLUMNS["es"] * 50)
    for short in (0, 1):
        both = list(paths)
        both[short] = write_lines(tmp_path / f"short.{short}", list(COLUMNS.values())[short] * 50 + ["a", "b"])
        counts = [("2,000", "2,002"), ("2,002", "2,000")][1 - short]
        expected = f"{both[0]} has {counts[0]} lines and {both[1]} {counts[1]}"
        assert fails(whole(both[0], both[1])) == expected


def test_lines_of_two_files_that_are_bad_keep_the_others_in_step(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_bytes(b"\xef\xbb\xbfone\r\ntw\xffo\nthree\n\nfive\n")
    (tmp_path / "a.es").write_bytes(b"uno\ndos\ntr\0es\n\n\n")
    result = read(tmp_path / "a.en", target_path=str(tmp_path / "a.es"))
    assert result == [
        ("one\r", "uno"),
        BadDocument(2, "not UTF-8"),
        BadDocument(3, "NUL bytes"),
        ("", ""),
        ("five", ""),
    ]


@pytest.mark.parametrize("side", ["en", "es"])
def test_a_compressed_file_that_is_cut_is_refused_with_its_name(tmp_path: Path, side: str) -> None:
    for each, column in COLUMNS.items():
        packed = gzip.compress("\n".join(column).encode())
        (tmp_path / f"a.{each}.gz").write_bytes(packed[: len(packed) // 2] if each == side else packed)
    where = f"{tmp_path}/a.es.gz: " if side == "es" else ""  # the first file's name stands before its reason anyway
    assert fails(whole(tmp_path / "a.en.gz", tmp_path / "a.es.gz")) == f"{where}broken gzip"


@pytest.mark.parametrize("change", [lambda path: path.write_text("x"), lambda path: path.unlink()])
def test_a_second_file_that_changes_is_refused_with_its_name(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    paths = [write_lines(tmp_path / f"a.{side}", COLUMNS[side]) for side in ("en", "es")]
    part = whole(*paths)
    change(paths[1])
    assert fails(part).startswith(f"{paths[1]}: ")


def test_sources_of_pairs_name_what_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"en": "one", "es": "uno"}]))
    for side in ("en", "es"):
        write_lines(tmp_path / f"a.{side}", COLUMNS[side])

    def refused(**source: Any) -> str:
        with pytest.raises(UserError) as refusal:
            list_files([Source.model_validate(source)])
        return str(refusal.value)

    here = str(tmp_path)
    assert "data.sources[0].target_path" in refused(path=f"{here}/a.en", target_path=f"{here}/none")
    assert "matches 3 files, expected one file of lines" in refused(path=f"{here}/a.en", target_path=f"{here}/a*")
    assert "is a .jsonl file, but target_path is for" in refused(path=f"{here}/a.jsonl", target_path=f"{here}/a.es")
    assert "has no file ending in .tsv" in refused(path=here, fields={"source": 1, "target": 2})
    assert "has no file ending in .jsonl, .json, .parquet" in refused(path=f"{here}/a.en", fields=FIELDS)


TRIPLES = [("dog", "is a", "animal"), ("wheel", "part_of", "car"), ("", "is a", "thing"), ("thing", " ", "dog")]
TRIPLES += [("x", "y", "")]


def test_every_format_holds_the_same_triples(tmp_path: Path) -> None:
    rows = [{"tail": tail, "head": head, "rel": relation} for head, relation, tail in TRIPLES]
    (tmp_path / "a.jsonl").write_bytes(jsonl([*rows, {"head": "dog", "rel": "is a"}]))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    columns = {name: [row[name] for row in rows] for name in ("rel", "head", "tail")}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.tsv", [f"{relation}\t{head}\t{tail}\t1.5" for head, relation, tail in TRIPLES])
    fields = {"source": "head", "relation": "rel", "target": "tail"}
    bad = BadDocument(4, "empty relation")
    expected = [("dog <is_a>", "animal"), ("wheel <part_of>", "car"), ("", "thing"), bad, ("x <y>", "")]
    assert read(tmp_path / "a.jsonl", fields=fields) == [*expected, BadDocument(6, "no field 'tail'")]
    assert read(tmp_path / "a.json", fields=fields) == expected
    assert read(tmp_path / "a.parquet", fields=fields) == expected
    assert read(tmp_path / "a.tsv", fields={"source": 2, "relation": 1, "target": 3}) == expected
    for wrong, complaint in (
        ({"source": "head", "relation": 1, "target": "tail"}, "expected two names of fields, or two column numbers"),
        ({"source": "head", "relation": "head", "target": "tail"}, "expected two different fields"),
        ({"source": 1, "relation": 0, "target": 2}, "columns are counted from 1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            Source.model_validate({"path": "a.jsonl", "fields": wrong})
