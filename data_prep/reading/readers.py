"""Reads the documents or pairs of a file range; yields a bad one as `BadDocument` and goes on."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.file_reader import FileReader
from multihop.data_prep.reading.lines import blocks, lines
from multihop.data_prep.reading.pairs import read_line_files, read_tsv
from multihop.data_prep.reading.raw import (
    MAX_DOCUMENT_BYTES,
    NOT_UTF8,
    NUL,
    TOO_LONG,
    BadDocument,
    RawDocument,
    decode_line,
    make_pair,
    range_bytes,
    range_stop,
)
from multihop.data_prep.reading.sources import FileRange, InputFile

MAX_JSON_BYTES = 256 * 2**20
"""Limit for a .json file, which is parsed whole; a .jsonl file has no limit."""

_Pick = Callable[[Any, int], RawDocument | BadDocument]
"""(row, position) -> the document or pair in a row of JSON."""


def read_range(file_range: FileRange) -> Iterator[RawDocument | BadDocument]:
    """Yield the documents or pairs of a range, in order, unchanged.

    Raises:
        UnreadableFileError: nothing of the file may be used. It may be raised only at the end, if the file is truncated
            or has changed meanwhile: discard what was yielded then.
        ReadFailed: a server does not answer.
    """
    file = file_range.file
    if file.problem:
        raise UnreadableFileError(file.problem)
    with FileReader(file) as reader:
        try:
            yield from read_open_range(file_range, reader)
        except UnreadableFileError:
            reader.check_unchanged()  # a file that is being modified may look broken
            raise
        reader.check_unchanged()


def read_open_range(file_range: FileRange, reader: FileReader) -> Iterator[RawDocument | BadDocument]:
    """Read as `read_range`, from an open file and without the check for changes."""
    file = file_range.file
    if file.format in ("lines", "tsv"):
        yield from (read_line_files if file.format == "lines" else read_tsv)(file_range, reader)
    elif file.format in ("parquet", "arrow"):
        yield from _read_table(file_range, reader)
    elif file.format == "jsonl":
        yield from _read_jsonl(file_range, reader)
    elif file.format == "json":
        yield from _read_json(file_range, reader)
    elif file.documents == "file":
        yield _read_txt(file_range, reader)
    else:
        yield from _read_texts(file_range, reader)


def _whole(file_range: FileRange, reader: FileReader, limit: int, too_long: str) -> str:
    held, size = [], 0
    for chunk in range_bytes(file_range, reader):
        held.append(chunk)
        size += len(chunk)
        if size > limit:
            raise UnreadableFileError(too_long)
    try:
        return b"".join(held).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableFileError(NOT_UTF8) from None


def _read_txt(file_range: FileRange, reader: FileReader) -> str:
    text = _whole(file_range, reader, MAX_DOCUMENT_BYTES, TOO_LONG)
    if "\0" in text:
        raise UnreadableFileError(NUL)
    return text


def _read_texts(file_range: FileRange, reader: FileReader) -> Iterator[str | BadDocument]:
    """Read lines or blocks; blank lines are skipped."""
    data, stop = range_bytes(file_range, reader), range_stop(file_range)
    if file_range.file.documents == "line":
        offsets_and_lines = lines(data, file_range.start, stop, MAX_DOCUMENT_BYTES)
    else:
        offsets_and_lines = blocks(data, file_range.start, stop, MAX_DOCUMENT_BYTES, reader.read_at)
    position = 0
    for at, text in offsets_and_lines:
        if text is not None and (not text or text.isspace()):
            continue
        position += 1
        yield decode_line(text, at, position)


def _read_jsonl(file_range: FileRange, reader: FileReader) -> Iterator[RawDocument | BadDocument]:
    offsets_and_lines = lines(
        range_bytes(file_range, reader), file_range.start, range_stop(file_range), MAX_DOCUMENT_BYTES
    )
    pick = _make_pick(file_range.file)
    for position, (_, line) in enumerate(offsets_and_lines, start=1):
        if line is None:
            yield BadDocument(position, TOO_LONG)
            continue
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            yield BadDocument(position, NOT_UTF8)
        except (ValueError, RecursionError):
            yield _retry_line(line, pick, position)
        else:
            yield pick(row, position)


def _retry_line(line: bytes, pick: _Pick, position: int) -> RawDocument | BadDocument:
    """Handle what concatenated files contain: blank lines and byte order marks."""
    if not line or line.isspace():
        return BadDocument(position, "empty")
    try:
        return pick(json.loads(line.decode("utf-8-sig")), position)
    except (ValueError, RecursionError):
        return BadDocument(position, "broken JSON")


def _read_json(file_range: FileRange, reader: FileReader) -> Iterator[RawDocument | BadDocument]:
    text = _whole(file_range, reader, MAX_JSON_BYTES, "longer than 256 MiB; .jsonl has no limit")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableFileError("broken JSON") from None
    if isinstance(parsed, dict):
        parsed = list(parsed.values())
    if not isinstance(parsed, list):
        raise UnreadableFileError("neither a list of objects nor an object of objects")
    pick = _make_pick(file_range.file)
    for position, row in enumerate(parsed, start=1):
        yield pick(row, position)


def _make_pick(file: InputFile) -> _Pick:
    if file.fields is None:
        return lambda row, position: _field(row, file.field, position)
    names = [str(name) for name in file.fields]

    return lambda row, position: _pair([_field(row, name, position) for name in names], position)


def _pair(sides: list[str | BadDocument], position: int) -> RawDocument | BadDocument:
    """Return the pair of source and target, or of a triple's head, tail and relation."""
    return make_pair(sides[0], sides[1], sides[2] if len(sides) > 2 else None, position)


def _field(row: Any, field: str, position: int) -> str | BadDocument:
    if not isinstance(row, dict) or field not in row:
        return BadDocument(position, f"no field {field!r}")
    return _text(row[field], field, position)


def _text(value: Any, field: str, position: int) -> str | BadDocument:
    if not isinstance(value, str):
        return BadDocument(position, f"field {field!r} is not text")
    return value if len(value) <= MAX_DOCUMENT_BYTES else BadDocument(position, TOO_LONG)


def _read_table(file_range: FileRange, reader: FileReader) -> Iterator[RawDocument | BadDocument]:
    # Imported only when needed: importing pyarrow's table readers takes longer than a small preparation.
    from multihop.data_prep.reading.tables import arrow_values, parquet_values

    values = parquet_values if file_range.file.format == "parquet" else arrow_values
    fields = file_range.file.fields
    if fields is None:
        for position, (value,) in enumerate(values(file_range, reader, [file_range.file.field]), start=1):
            yield _value(value, file_range.file.field, position)
        return
    names = [str(name) for name in fields]
    for position, row in enumerate(values(file_range, reader, names), start=1):
        yield _pair([_value(value, name, position) for value, name in zip(row, names, strict=True)], position)


def _value(value: str | bytes | None, field: str, position: int) -> str | BadDocument:
    return BadDocument(position, NOT_UTF8) if isinstance(value, bytes) else _text(value, field, position)
