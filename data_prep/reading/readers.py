"""Reads the documents of one part of a file; a bad document is yielded as `Bad` and does not stop the rest."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from data_prep.reading.compression import chunks
from data_prep.reading.failures import UnreadableFileError
from data_prep.reading.lines import blocks, lines
from data_prep.reading.opening import OpenedFile
from data_prep.reading.sources import Part

MAX_DOCUMENT_BYTES = 64 * 2**20
MAX_JSON_BYTES = 256 * 2**20
"""A .json file is parsed whole, so its size is limited; a .jsonl file has no limit."""

TOO_LONG = "longer than 64 MiB"
_NOT_UTF8 = "not UTF-8"
_NUL = "NUL bytes"
"""Text has none; UTF-16 that happens to be valid UTF-8 does."""


@dataclass(frozen=True)
class Bad:
    """A document that cannot be read."""

    place: int
    """Line (.jsonl), item (.json), row (.parquet, .arrow) or document (.txt), counted from 1 in the part."""
    reason: str


def read_part(part: Part) -> Iterator[str | Bad]:
    """The documents of a part, in order, unchanged.

    Raises UnreadableFileError when nothing of the file may be used, possibly only at the end, if it is truncated or has
    changed meanwhile; discard what was yielded then. Raises ReadFailed when a server does not answer.
    """
    file = part.file
    if file.problem:
        raise UnreadableFileError(file.problem)
    with OpenedFile(file) as opened:
        yield from read_opened(part, opened)
        opened.check_unchanged()


def read_opened(part: Part, opened: OpenedFile) -> Iterator[str | Bad]:
    """`read_part` of an open file, without the check for changes."""
    file = part.file
    if file.format in ("parquet", "arrow"):
        yield from _read_table(part, opened)
    elif file.format == "jsonl":
        yield from _read_jsonl(part, opened)
    elif file.format == "json":
        yield from _read_json(part, opened)
    elif file.documents == "file":
        yield _read_txt(part, opened)
    else:
        yield from _read_texts(part, opened)


def _bytes_of(part: Part, opened: OpenedFile) -> Iterator[bytes]:
    """The bytes from the one before the part on, which decides whether a line begins at the part's start."""
    return chunks(opened, part.file.packing, max(0, part.start - 1))


def _stop(part: Part) -> float:
    return inf if part.file.packing else part.stop


def _whole(part: Part, opened: OpenedFile, limit: int, too_long: str) -> str:
    held, size = [], 0
    for chunk in _bytes_of(part, opened):
        held.append(chunk)
        size += len(chunk)
        if size > limit:
            raise UnreadableFileError(too_long)
    try:
        return b"".join(held).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableFileError(_NOT_UTF8) from None


def _read_txt(part: Part, opened: OpenedFile) -> str:
    text = _whole(part, opened, MAX_DOCUMENT_BYTES, TOO_LONG)
    if "\0" in text:
        raise UnreadableFileError(_NUL)
    return text


def _read_texts(part: Part, opened: OpenedFile) -> Iterator[str | Bad]:
    """Lines or blocks; blank lines are skipped."""
    data, stop = _bytes_of(part, opened), _stop(part)
    if part.file.documents == "line":
        found = lines(data, part.start, stop, MAX_DOCUMENT_BYTES)
    else:
        found = blocks(data, part.start, stop, MAX_DOCUMENT_BYTES, opened.read_at)
    place = 0
    for at, text in found:
        if text is not None and (not text or text.isspace()):
            continue
        place += 1
        if text is None:
            yield Bad(place, TOO_LONG)
        elif b"\0" in text:
            yield Bad(place, _NUL)
        else:
            try:
                yield text.decode("utf-8" if at else "utf-8-sig")
            except UnicodeDecodeError:
                yield Bad(place, _NOT_UTF8)


def _read_jsonl(part: Part, opened: OpenedFile) -> Iterator[str | Bad]:
    found = lines(_bytes_of(part, opened), part.start, _stop(part), MAX_DOCUMENT_BYTES)
    field = part.file.field
    for place, (_, line) in enumerate(found, start=1):
        if line is None:
            yield Bad(place, TOO_LONG)
            continue
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            yield Bad(place, _NOT_UTF8)
        except (ValueError, RecursionError):
            yield _retry_line(line, field, place)
        else:
            yield _field(row, field, place)


def _retry_line(line: bytes, field: str, place: int) -> str | Bad:
    """Handle what concatenated files contain: blank lines and byte order marks."""
    if not line or line.isspace():
        return Bad(place, "empty")
    try:
        return _field(json.loads(line.decode("utf-8-sig")), field, place)
    except (ValueError, RecursionError):
        return Bad(place, "broken JSON")


def _read_json(part: Part, opened: OpenedFile) -> Iterator[str | Bad]:
    text = _whole(part, opened, MAX_JSON_BYTES, "longer than 256 MiB; .jsonl has no limit")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableFileError("broken JSON") from None
    if isinstance(parsed, dict):
        parsed = list(parsed.values())
    if not isinstance(parsed, list):
        raise UnreadableFileError("neither a list of objects nor an object of objects")
    for place, row in enumerate(parsed, start=1):
        yield _field(row, part.file.field, place)


def _field(row: Any, field: str, place: int) -> str | Bad:
    if not isinstance(row, dict) or field not in row:
        return Bad(place, f"no field {field!r}")
    return _text(row[field], field, place)


def _text(value: Any, field: str, place: int) -> str | Bad:
    if not isinstance(value, str):
        return Bad(place, f"field {field!r} is not text")
    return value if len(value) <= MAX_DOCUMENT_BYTES else Bad(place, TOO_LONG)


def _read_table(part: Part, opened: OpenedFile) -> Iterator[str | Bad]:
    # Imported only when needed: importing pyarrow's table readers takes longer than a small preparation.
    from data_prep.reading.tables import arrow_values, parquet_values

    values = parquet_values if part.file.format == "parquet" else arrow_values
    for place, value in enumerate(values(part, opened), start=1):
        yield Bad(place, _NOT_UTF8) if isinstance(value, bytes) else _text(value, part.file.field, place)
