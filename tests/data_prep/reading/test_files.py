import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.data_prep.config import Source
from multihop.data_prep.reading import readers
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import FileRange, InputFile, group_into_splits, list_files

ROWS = [{"text": "one"}, {"text": "zwei €"}, {"text": "three"}]
TEXTS = [row["text"] for row in ROWS]


def all_of(path: Path, field: str = "text") -> list[str | BadDocument]:
    (file,) = list_files([Source(path=str(path), field=field)])
    return [item for split in group_into_splits([file]) for part in split for item in read_range(part)]


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "zwei €"),
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)),
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps({str(key): row for key, row in enumerate(ROWS)})),
        ("A.JSONL", "\ufeff" + "".join(json.dumps(row) + "\r\n" for row in ROWS)),
    ],
)
def test_every_text_format_is_read_plain_and_gzipped(tmp_path, name, content, gz):
    path = tmp_path / (name + ".gz" * gz)
    path.write_bytes(gzip.compress(content.encode()) if gz else content.encode())
    assert all_of(path) == (["zwei €"] if "txt" in name else TEXTS)


def test_parquet_is_read_over_row_groups_and_null_is_bad(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "body": ["one", None, "zwei €", "three"]}), path, row_group_size=2)
    assert all_of(path, "body") == ["one", BadDocument(2, "field 'body' is not text"), "zwei €", "three"]


def test_bad_lines_come_out_with_their_position_and_reason_and_the_rest_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    deep = b"[" * 100_000
    lines = [b'{"text": "one"}', b"{broken", b'{"other": "x"}', b'{"text": 3}', b'{"text": "\xff"}', b"", b"[1]", deep,
             b'{"text": "two"}', b'{"text": "cut of']  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    assert all_of(path) == [
        "one",
        BadDocument(2, "broken JSON"),
        BadDocument(3, "no field 'text'"),
        BadDocument(4, "field 'text' is not text"),
        BadDocument(5, "not UTF-8"),
        BadDocument(6, "empty"),
        BadDocument(7, "no field 'text'"),
        BadDocument(8, "broken JSON"),
        "two",
        BadDocument(10, "broken JSON"),
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": "x", "score": NaN}', "x"),
        ('{"text": "x", "score": [-Infinity, 1e999]}', "x"),
        ('{"text": "x", "score": 123456789012345678901234567890}', "x"),
        ('{"text": "y", "text": "x"}', "x"),
        ('{"text": "\\ud83d"}', "\ud83d"),
        ('{"text": "\\ud83d\\ude00\\u0000"}', "\U0001f600\0"),
        ('\ufeff{"text": "x"}', "x"),
        (' {"text": "x"} \r', "x"),
        ('{"text": "x", }', BadDocument(1, "broken JSON")),
        ('{"text": "x"} {"text": "y"}', BadDocument(1, "broken JSON")),
        ("{'text': 'x'}", BadDocument(1, "broken JSON")),
        ('{"text": "a\tb"}', BadDocument(1, "broken JSON")),
        ('{"text": ' + "[" * 2000 + "]" * 2000 + "}", BadDocument(1, "broken JSON")),
    ],
)
def test_what_is_json_is_what_the_standard_library_says(tmp_path, line, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line.encode() + b"\n")
    assert all_of(path) == [text]


def test_an_endless_line_is_set_aside_without_being_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + "x" * 2_000_000 + '\n{"text": "two"}\n' + "y" * 1001)
    assert all_of(path) == ["one", BadDocument(2, "longer than 64 MiB"), "two", BadDocument(4, "longer than 64 MiB")]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"\xff\xfeh\x00i\x00", "not UTF-8"),
        ("a.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:-9], "broken gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "one"}\n' * 50_000, mtime=0)[:-500], "broken gzip"),
        ("a.jsonl.gz", b"no gzip at all", "broken gzip"),
        ("a.json", b'[{"text": "one"},', "broken JSON"),
        ("a.json", b'"text"', "neither a list of objects nor an object of objects"),
        ("a.json", b"\xff", "not UTF-8"),
        ("a.parquet", b"no parquet", "broken parquet"),
    ],
)
def test_a_file_that_is_broken_anywhere_gives_no_document_at_all(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    (file,) = list_files([Source(path=str(path))])
    with pytest.raises(UnreadableFileError, match=reason):
        list(read_range(FileRange(file, 0, file.size)))


def test_a_parquet_file_with_a_damaged_page_gives_no_document(tmp_path):
    path = tmp_path / "a.parquet"
    text = [f"some words that compress {number}" for number in range(5_000)]
    pq.write_table(pa.table({"text": text}), path, row_group_size=1_000, compression="gzip", use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 200] = bytes(200)
    path.write_bytes(damaged)
    (file,) = list_files([Source(path=str(path))])
    with pytest.raises(UnreadableFileError, match="broken parquet"):
        list(read_range(FileRange(file, 0, file.size)))


@given(st.lists(st.text(max_size=30), max_size=30), st.integers(1, 60))
def test_a_file_cut_anywhere_gives_each_line_once(tmp_path_factory, texts, split_bytes):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode())
    (file,) = list_files([Source(path=str(path))])
    splits = group_into_splits([file], split_bytes)
    assert [item for split in splits for part in split for item in read_range(part)] == texts


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 120))
def test_splits_cover_every_file_once_and_in_order(sizes, split_bytes):
    files = [InputFile(f"{i}.jsonl", f"/{i}", 0, "text", "jsonl", "", size, 0) for i, size in enumerate(sizes)]
    splits = group_into_splits(files, split_bytes)
    parts = [part for split in splits for part in split]
    assert [part for part in parts if part.start == 0] == [FileRange(f, 0, min(f.size, split_bytes)) for f in files]
    assert sum(part.stop - part.start for part in parts) == sum(sizes)
    assert all(sum(part.stop - part.start for part in split) < 2 * split_bytes for split in splits)


def test_folders_globs_and_files_name_the_same_documents_in_one_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("t/b.txt", "t/a.jsonl.gz", "t/deep/c.json", "t/README.md", "t/.hidden.txt", "t/.git/x.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"")

    def names(path: str) -> list[str]:
        return [file.name for file in list_files([Source(path=path)])]

    assert names("t") == ["t/a.jsonl.gz", "t/b.txt", "t/deep/c.json"]
    assert names("t/**") == names("t")
    assert names("t/*.txt") == ["t/b.txt"]
    assert names("t/deep/c.json") == ["t/deep/c.json"]


def test_files_of_an_installed_package_are_found_without_running_it(tmp_path, monkeypatch):
    package = tmp_path / "some_texts"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "data" / "a.txt").write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path))
    (file,) = list_files([Source(path="package:some_texts/data/*.txt")])
    assert file.name == "package:some_texts/data/a.txt"
    assert Path(file.path).read_text() == "one"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere/*.txt", r"sources\[0\].path=nowhere/\*.txt does not exist; correct the path"),
        ("empty", "has no file ending in .txt, .jsonl, .json, .parquet"),
        ("package:no_such_package_here/x.txt", "no_such_package_here.*not installed; pip install no-such-package-here"),
        ("package:os.path/x.txt", "top-level package"),
        ("link.txt", r"data.sources\[0\].path=link.txt cannot be read \(broken link\)"),
        ("package:json/no/such/*.txt", "does not exist"),
    ],
)
def test_a_source_that_does_not_exist_is_refused_with_what_to_do(tmp_path, monkeypatch, path, sentence):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("empty/notes.md").write_text("x")
    Path("link.txt").symlink_to("nothing")
    with pytest.raises(UserError, match=sentence):
        list_files([Source(path=path)])
