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
"""A .json file is parsed whole, so its size is limited; a .jsonl file has no limit."""

_Pick = Callable[[Any, int], RawDocument | BadDocument]
"""(row, position) -> the document or pair in a row of JSON."""


def read_range(part: FileRange) -> Iterator[RawDocument | BadDocument]:
    """Yield the documents or pairs of a part, in order, unchanged.

    Raises UnreadableFileError when nothing of the file may be used, possibly only at the end, if it is truncated or has
    changed meanwhile; discard what was yielded then. Raises ReadFailed when a server does not answer.
    """
    file = part.file
    if file.problem:
        raise UnreadableFileError(file.problem)
    with FileReader(file) as opened:
        try:
            yield from read_open_range(part, opened)
        except UnreadableFileError:
            opened.check_unchanged()  # a file that is being modified may look broken
            raise
        opened.check_unchanged()


def read_open_range(part: FileRange, opened: FileReader) -> Iterator[RawDocument | BadDocument]:
    """`read_range` of an open file, without the check for changes."""
    file = part.file
    if file.format in ("lines", "tsv"):
        yield from (read_line_files if file.format == "lines" else read_tsv)(part, opened)
    elif file.format in ("parquet", "arrow"):
        yield from _read_table(part, opened)
    elif file.format == "jsonl":
        yield from _read_jsonl(part, opened)
    elif file.format == "json":
        yield from _read_json(part, opened)
    elif file.documents == "file":
        yield _read_txt(part, opened)
    else:
        yield from _read_texts(part, opened)


def _whole(part: FileRange, opened: FileReader, limit: int, too_long: str) -> str:
    held, size = [], 0
    for chunk in range_bytes(part, opened):
        held.append(chunk)
        size += len(chunk)
        if size > limit:
            raise UnreadableFileError(too_long)
    try:
        return b"".join(held).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableFileError(NOT_UTF8) from None


def _read_txt(part: FileRange, opened: FileReader) -> str:
    text = _whole(part, opened, MAX_DOCUMENT_BYTES, TOO_LONG)
    if "\0" in text:
        raise UnreadableFileError(NUL)
    return text


def _read_texts(part: FileRange, opened: FileReader) -> Iterator[str | BadDocument]:
    """Lines or blocks; blank lines are skipped."""
    data, stop = range_bytes(part, opened), range_stop(part)
    if part.file.documents == "line":
        found = lines(data, part.start, stop, MAX_DOCUMENT_BYTES)
    else:
        found = blocks(data, part.start, stop, MAX_DOCUMENT_BYTES, opened.read_at)
    position = 0
    for at, text in found:
        if text is not None and (not text or text.isspace()):
            continue
        position += 1
        yield decode_line(text, at, position)


def _read_jsonl(part: FileRange, opened: FileReader) -> Iterator[RawDocument | BadDocument]:
    found = lines(range_bytes(part, opened), part.start, range_stop(part), MAX_DOCUMENT_BYTES)
    pick = _picker(part.file)
    for position, (_, line) in enumerate(found, start=1):
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


def _read_json(part: FileRange, opened: FileReader) -> Iterator[RawDocument | BadDocument]:
    text = _whole(part, opened, MAX_JSON_BYTES, "longer than 256 MiB; .jsonl has no limit")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableFileError("broken JSON") from None
    if isinstance(parsed, dict):
        parsed = list(parsed.values())
    if not isinstance(parsed, list):
        raise UnreadableFileError("neither a list of objects nor an object of objects")
    pick = _picker(part.file)
    for position, row in enumerate(parsed, start=1):
        yield pick(row, position)


def _picker(file: InputFile) -> _Pick:
    if file.fields is None:
        return lambda row, position: _field(row, file.field, position)
    first, second = map(str, file.fields)

    return lambda row, position: make_pair(_field(row, first, position), _field(row, second, position))


def _field(row: Any, field: str, position: int) -> str | BadDocument:
    if not isinstance(row, dict) or field not in row:
        return BadDocument(position, f"no field {field!r}")
    return _text(row[field], field, position)


def _text(value: Any, field: str, position: int) -> str | BadDocument:
    if not isinstance(value, str):
        return BadDocument(position, f"field {field!r} is not text")
    return value if len(value) <= MAX_DOCUMENT_BYTES else BadDocument(position, TOO_LONG)


def _read_table(part: FileRange, opened: FileReader) -> Iterator[RawDocument | BadDocument]:
    # Imported only when needed: importing pyarrow's table readers takes longer than a small preparation.
    from multihop.data_prep.reading.tables import arrow_values, parquet_values

    values = parquet_values if part.file.format == "parquet" else arrow_values
    fields = part.file.fields
    if fields is None:
        for position, (value,) in enumerate(values(part, opened, [part.file.field]), start=1):
            yield _value(value, part.file.field, position)
        return
    first, second = map(str, fields)
    for position, (source, target) in enumerate(values(part, opened, [first, second]), start=1):
        yield make_pair(_value(source, first, position), _value(target, second, position))


def _value(value: str | bytes | None, field: str, position: int) -> str | BadDocument:
    return BadDocument(position, NOT_UTF8) if isinstance(value, bytes) else _text(value, field, position)
