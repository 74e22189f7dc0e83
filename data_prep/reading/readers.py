"""Reads the documents or pairs of one part of a file; a bad one is yielded as `Bad` and does not stop the rest."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from multihop.data_prep.reading.failures import UnreadableFileError
from multihop.data_prep.reading.lines import blocks, lines
from multihop.data_prep.reading.opening import OpenedFile
from multihop.data_prep.reading.pairs import read_line_files, read_tsv
from multihop.data_prep.reading.raw import (
    MAX_DOCUMENT_BYTES,
    NOT_UTF8,
    NUL,
    TOO_LONG,
    Bad,
    Raw,
    bytes_of,
    pair_of,
    stop_of,
    text_of,
)
from multihop.data_prep.reading.sources import InputFile, Part

MAX_JSON_BYTES = 256 * 2**20
"""A .json file is parsed whole, so its size is limited; a .jsonl file has no limit."""

_Pick = Callable[[Any, int], Raw | Bad]
"""(row, place) -> the document or pair in a row of JSON."""


def read_part(part: Part) -> Iterator[Raw | Bad]:
    """The documents or pairs of a part, in order, unchanged.

    Raises UnreadableFileError when nothing of the file may be used, possibly only at the end, if it is truncated or has
    changed meanwhile; discard what was yielded then. Raises ReadFailed when a server does not answer.
    """
    file = part.file
    if file.problem:
        raise UnreadableFileError(file.problem)
    with OpenedFile(file) as opened:
        try:
            yield from read_opened(part, opened)
        except UnreadableFileError:
            opened.check_unchanged()  # a file that is being modified may look broken
            raise
        opened.check_unchanged()


def read_opened(part: Part, opened: OpenedFile) -> Iterator[Raw | Bad]:
    """`read_part` of an open file, without the check for changes."""
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


def _whole(part: Part, opened: OpenedFile, limit: int, too_long: str) -> str:
    held, size = [], 0
    for chunk in bytes_of(part, opened):
        held.append(chunk)
        size += len(chunk)
        if size > limit:
            raise UnreadableFileError(too_long)
    try:
        return b"".join(held).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableFileError(NOT_UTF8) from None


def _read_txt(part: Part, opened: OpenedFile) -> str:
    text = _whole(part, opened, MAX_DOCUMENT_BYTES, TOO_LONG)
    if "\0" in text:
        raise UnreadableFileError(NUL)
    return text


def _read_texts(part: Part, opened: OpenedFile) -> Iterator[str | Bad]:
    """Lines or blocks; blank lines are skipped."""
    data, stop = bytes_of(part, opened), stop_of(part)
    if part.file.documents == "line":
        found = lines(data, part.start, stop, MAX_DOCUMENT_BYTES)
    else:
        found = blocks(data, part.start, stop, MAX_DOCUMENT_BYTES, opened.read_at)
    place = 0
    for at, text in found:
        if text is not None and (not text or text.isspace()):
            continue
        place += 1
        yield text_of(text, at, place)


def _read_jsonl(part: Part, opened: OpenedFile) -> Iterator[Raw | Bad]:
    found = lines(bytes_of(part, opened), part.start, stop_of(part), MAX_DOCUMENT_BYTES)
    pick = _picker(part.file)
    for place, (_, line) in enumerate(found, start=1):
        if line is None:
            yield Bad(place, TOO_LONG)
            continue
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            yield Bad(place, NOT_UTF8)
        except (ValueError, RecursionError):
            yield _retry_line(line, pick, place)
        else:
            yield pick(row, place)


def _retry_line(line: bytes, pick: _Pick, place: int) -> Raw | Bad:
    """Handle what concatenated files contain: blank lines and byte order marks."""
    if not line or line.isspace():
        return Bad(place, "empty")
    try:
        return pick(json.loads(line.decode("utf-8-sig")), place)
    except (ValueError, RecursionError):
        return Bad(place, "broken JSON")


def _read_json(part: Part, opened: OpenedFile) -> Iterator[Raw | Bad]:
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
    for place, row in enumerate(parsed, start=1):
        yield pick(row, place)


def _picker(file: InputFile) -> _Pick:
    if file.fields is None:
        return lambda row, place: _field(row, file.field, place)
    first, second = map(str, file.fields)

    return lambda row, place: pair_of(_field(row, first, place), _field(row, second, place))


def _field(row: Any, field: str, place: int) -> str | Bad:
    if not isinstance(row, dict) or field not in row:
        return Bad(place, f"no field {field!r}")
    return _text(row[field], field, place)


def _text(value: Any, field: str, place: int) -> str | Bad:
    if not isinstance(value, str):
        return Bad(place, f"field {field!r} is not text")
    return value if len(value) <= MAX_DOCUMENT_BYTES else Bad(place, TOO_LONG)


def _read_table(part: Part, opened: OpenedFile) -> Iterator[Raw | Bad]:
    # Imported only when needed: importing pyarrow's table readers takes longer than a small preparation.
    from multihop.data_prep.reading.tables import arrow_values, parquet_values

    values = parquet_values if part.file.format == "parquet" else arrow_values
    fields = part.file.fields
    if fields is None:
        for place, (value,) in enumerate(values(part, opened, [part.file.field]), start=1):
            yield _value(value, part.file.field, place)
        return
    first, second = map(str, fields)
    for place, (source, target) in enumerate(values(part, opened, [first, second]), start=1):
        yield pair_of(_value(source, first, place), _value(target, second, place))


def _value(value: str | bytes | None, field: str, place: int) -> str | Bad:
    return Bad(place, NOT_UTF8) if isinstance(value, bytes) else _text(value, field, place)
