"""Detects which fields of a source's files hold text, from some of their rows, and reads some of the texts."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.file_reader import FileReader
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_open_range
from multihop.data_prep.reading.sources import FileRange, InputFile

WITH_FIELDS = ("jsonl", "json", "parquet", "arrow")
_FILES, _ROWS = 3, 100
"""Numbers of files and of rows of each to read: the first, the middle and the last file, from their beginnings."""
_LOOKED_AT = 4 * 2**20
"""Bytes to read of a file that can be cut."""
_WORDS, _LETTERS = 3, 10
"""A value with at least as many words, or letters outside ASCII (scripts without spaces), is text and not an id."""


def text_fields(files: Sequence[InputFile]) -> dict[str, float]:
    """Return the mean number of characters of each field with text in at least half of the rows, the longest first.

    Rows that cannot be read are passed over; files without fields (.txt) have none.
    """
    rows = [row for file in _some(files) if file.format in WITH_FIELDS for row in islice(_rows(file), _ROWS)]
    lengths: dict[str, list[int]] = {}
    for row in rows:
        for field, value in row.items():
            if isinstance(value, str) and _is_text(value):
                lengths.setdefault(field, []).append(len(value))
    means = {field: sum(found) / len(found) for field, found in lengths.items() if 2 * len(found) >= len(rows)}
    return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))


def some_texts(files: Sequence[InputFile]) -> Iterator[str]:
    """Yield the readable documents at the beginnings of some of the files."""
    for file in _some(files):
        try:
            with FileReader(file) as opened:
                for document in read_open_range(_beginning(file), opened):
                    if isinstance(document, str):
                        yield document
        except UnreadableFileError:
            continue


def _some(files: Sequence[InputFile]) -> list[InputFile]:
    readable = [file for file in files if file.size and not file.problem]
    indexes = {round(index * (len(readable) - 1) / (_FILES - 1)) for index in range(_FILES)} if readable else set()
    return [readable[index] for index in sorted(indexes)]


def _beginning(file: InputFile) -> FileRange:
    return FileRange(file, 0, min(file.size, _LOOKED_AT) if file.is_splittable else file.size)


def _rows(file: InputFile) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as mappings of fields; of tables only the columns that can be text."""
    try:
        if file.format in ("parquet", "arrow"):
            yield from _table_rows(file)
            return
        # The lines of .jsonl, or all of .json, are read as text: a reader of documents has a field already.
        as_text = dataclasses.replace(file, format="txt", documents="line" if file.format == "jsonl" else "file")
        with FileReader(as_text) as opened:
            for text in read_open_range(_beginning(as_text), opened):
                yield from () if isinstance(text, BadDocument) or not isinstance(text, str) else _objects(text)
    except UnreadableFileError:
        return


def _objects(text: str) -> Iterator[dict[str, Any]]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return
    items = parsed.values() if isinstance(parsed, dict) else parsed if isinstance(parsed, list) else ()
    if isinstance(parsed, dict) and not all(isinstance(item, dict) for item in items):
        items = [parsed]
    yield from (item for item in items if isinstance(item, dict))


def _table_rows(file: InputFile) -> Iterator[dict[str, Any]]:
    # Imported only when needed, as in `readers`.
    from multihop.data_prep.reading.tables import arrow_values, parquet_values, text_columns

    with FileReader(file) as opened:
        columns = text_columns(file, opened)
        values = parquet_values if file.format == "parquet" else arrow_values
        for row in values(_beginning(file), opened, columns) if columns else ():
            yield dict(zip(columns, row, strict=True))


def _is_text(value: str) -> bool:
    letters = sum(1 for character in value[:1000] if not character.isascii() and character.isalpha())
    return len(value[:1000].split()) >= _WORDS or letters >= _LETTERS
