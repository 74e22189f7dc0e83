"""However a file is cut into parts, each of its documents is read once, in order, with bounded memory."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.data_prep.config import Source
from multihop.data_prep.reading import readers
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.lines import blocks, lines
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import (
    MAX_SPLIT_BYTES,
    MIN_SPLIT_BYTES,
    InputFile,
    group_into_splits,
    list_files,
    split_bytes_for,
)


def read(path: Path, split_bytes: int | None = None, **source: Any) -> list[str | BadDocument]:
    (file,) = list_files([Source(path=str(path), **source)])
    return [item for split in group_into_splits([file], split_bytes) for part in split for item in read_range(part)]


def in_chunks(data: bytes, start: int, size: int) -> list[bytes]:
    first = max(0, start - 1)
    return [data[at : at + size] for at in range(first, len(data), size)]


def cut(data: bytes, split_bytes: int) -> list[tuple[int, int]]:
    return [(at, min(at + split_bytes, len(data))) for at in range(0, len(data), split_bytes)]


LINES = st.lists(st.sampled_from([b"", b" ", b"\t \r", b"a", b"bb", b"ccc c", b"d" * 20, b"e" * 21]), max_size=20)


@given(LINES, st.booleans(), st.integers(1, 30), st.integers(1, 30))
def test_every_line_is_in_the_part_where_it_begins(texts: list[bytes], ended: bool, split: int, chunk: int) -> None:
    data = b"\n".join(texts) + b"\n" * ended
    wanted, at = [], 0
    for line in data.split(b"\n"):
        wanted.append((at, line if len(line) <= 20 else None))
        at += len(line) + 1
    if wanted[-1][1] == b"":
        del wanted[-1]
    found = [list(lines(in_chunks(data, a, chunk), a, b, 20)) for a, b in cut(data, split)]
    assert [line for part in found for line in part] == wanted
    for (a, b), part in zip(cut(data, split), found, strict=True):
        assert all(a <= at < b for at, _ in part)


def plain_blocks(data: bytes) -> list[tuple[int, bytes]]:
    """Return the blocks of the data, without parts, chunks and limits."""
    found: list[tuple[int, list[bytes]]] = []
    at, inside = 0, False
    for line in data.split(b"\n"):
        if not line.strip():
            inside = False
        elif inside:
            found[-1][1].append(line)
        else:
            found.append((at, [line]))
            inside = True
        at += len(line) + 1
    return [(at, b"\n".join(held)) for at, held in found]


@given(LINES, st.booleans(), st.integers(1, 60), st.integers(1, 30), st.integers(1, 5))
def test_every_block_is_in_the_part_where_it_begins(
    texts: list[bytes], ended: bool, split: int, chunk: int, limit_factor: int
) -> None:
    data, limit = b"\n".join(texts) + b"\n" * ended, 25 * limit_factor
    wanted = [(at, block if len(block) <= limit else None) for at, block in plain_blocks(data)]

    def read_at(nbytes: int, offset: int) -> bytes:
        return data[offset : offset + nbytes]

    found = [list(blocks(in_chunks(data, a, chunk), a, b, limit, read_at)) for a, b in cut(data, split)]
    assert [block for part in found for block in part] == wanted
    for (a, b), part in zip(cut(data, split), found, strict=True):
        assert all(a <= at < b for at, _ in part)


@pytest.mark.parametrize(
    ("first", "start", "found"),
    [(b"short\n", 0, [(0, b"short"), (6, None)]), (b"short\n", 10_000, [(10_005, None)]), (b"", 10_000, [])],
)
def test_a_line_that_is_too_long_is_not_read_further_than_its_part(
    first: bytes, start: int, found: list[tuple[int, bytes | None]]
) -> None:
    taken = []

    def endless() -> Iterator[bytes]:
        yield first
        while True:
            taken.append(1)
            yield b"x" * 1000

    assert list(lines(endless(), start, start + 5_000, 100)) == found
    assert len(taken) <= 6
    assert list(blocks(endless(), start, start + 5_000, 100, lambda *_: b"\n")) == [(at, None) for at, _ in found[:1]]
    assert len(taken) <= 12


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 20), st.integers(50, 5_000))
def test_every_row_group_and_record_batch_is_in_one_part(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], rows: int, split_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    texts = [str(length) * length for length in lengths]
    table = pa.table({"number": list(range(len(texts))), "text": pa.array(texts, pa.string())})
    pq.write_table(table, folder / "a.parquet", row_group_size=rows)
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    with pa.ipc.new_stream(str(folder / "b.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        assert read(folder / name, split_bytes) == texts


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())]
)
def test_a_column_of_any_kind_of_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    values = ["one", None, "zwei €", "one", ""]
    plain = [value.encode() if value is not None else None for value in values] if kind == pa.binary() else values
    column = pa.array(plain, kind if not pa.types.is_dictionary(kind) else pa.string())
    table = pa.table({"nested": [{"text": 1, "b": 2}] * 5, "text": column.cast(kind)})
    wanted = ["one", BadDocument(2, "field 'text' is not text"), "zwei €", "one", ""]
    for compression in (None, "zstd"):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
            writer.write_table(table)
        assert read(tmp_path / "a.arrow") == wanted
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == wanted


def test_a_value_that_is_not_utf8_is_bad_alone(tmp_path: Path) -> None:
    column = pa.array([b"one", b"f\xfcr", b"two"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["one", BadDocument(2, "not UTF-8"), "two"]


def test_a_document_of_a_txt_file_is_the_file_a_line_or_a_block(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n\r\n \t\r\nthree\n\n\nf\0ur\n\nfünf\n".encode() + b"\nsi\xff\n\n" + b"7" * 90)
    seven = "7" * 90
    assert read(path, documents="line") == [
        "one\r", "two\r", "three", BadDocument(4, "NUL bytes"), "fünf", BadDocument(6, "not UTF-8"), seven,
    ]  # fmt: skip
    assert read(path, documents="block") == [
        "one\r\ntwo\r", "three", BadDocument(3, "NUL bytes"), "fünf", BadDocument(5, "not UTF-8"), seven,
    ]  # fmt: skip
    with pytest.raises(UnreadableFileError, match="not UTF-8"):
        read(path)


@given(st.lists(st.text("ab \n\r€", max_size=12), max_size=12), st.integers(1, 40))
def test_a_txt_file_cut_anywhere_gives_the_same(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], split_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes("\n\n".join(texts).encode())
    for documents in ("line", "block"):
        whole = read(path, documents=documents)
        assert read(path, split_bytes, documents=documents) == whole
        assert all(isinstance(text, str) and text.strip() for text in whole)


def test_a_document_that_is_too_long_is_set_aside_in_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1_000)
    long, too_long = "x" * 5_000, BadDocument(2, "longer than 64 MiB")
    texts = ["one", long, "two"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts]))
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    table = pa.table({"text": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(readers, "MAX_JSON_BYTES", 100_000)
    for name in ("a.jsonl", "a.json", "a.parquet", "a.arrow"):
        assert read(tmp_path / name) == ["one", too_long, "two"]
    for documents in ("line", "block"):
        assert read(tmp_path / "a.txt", documents=documents) == ["one", too_long, "two"]


def some(*sizes: int) -> list[InputFile]:
    return [InputFile(f"{i}", f"/{i}", 0, "text", "jsonl", "", size, 0) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("total", "size"),
    [
        (0, MIN_SPLIT_BYTES),
        (4 * 2**30, MIN_SPLIT_BYTES),
        (4 * 2**30 + 1, 2 * MIN_SPLIT_BYTES),
        (10**12, 2**30),
        (10**15, 2**30),
    ],
)
def test_the_size_of_a_split_follows_from_the_whole(total: int, size: int) -> None:
    assert split_bytes_for(total) == min(size, MAX_SPLIT_BYTES)


def test_a_change_of_a_large_file_leaves_the_splits_of_the_others() -> None:
    before = group_into_splits(some(10, 20, 5_000, 30, 40, 7_000, 50), 1_000)
    after = group_into_splits(some(10, 20, 5_900, 30, 40, 7_000, 50), 1_000)
    others = [[part for part in split if part.file.name != "2"] for split in before]
    assert [split for split in others if split] == [s for s in after if s[0].file.name != "2"]
    assert [len(split) for split in before] == [2, *[1] * 5, 2, *[1] * 7, 1]


def test_many_small_files_are_several_splits_and_a_part_is_small_to_send() -> None:
    splits = group_into_splits(some(*[0] * 10_000))
    assert [len(split) for split in splits] == [4096, 4096, 1808]
    assert len(pickle.dumps(splits[0][0])) < 500
