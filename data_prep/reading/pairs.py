"""Reads pairs from two line files, and from the columns of .tsv files."""

from collections.abc import Iterator
from itertools import zip_longest
from math import inf

from multihop.data_prep.reading.compression import chunks
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.file_reader import FileReader
from multihop.data_prep.reading.lines import Line, lines
from multihop.data_prep.reading.raw import (
    MAX_DOCUMENT_BYTES,
    BadDocument,
    RawPair,
    decode_line,
    make_pair,
    range_bytes,
    range_stop,
)
from multihop.data_prep.reading.sources import FileRange, InputFile


def read_line_files(file_range: FileRange, reader: FileReader) -> Iterator[RawPair | BadDocument]:
    """Yield the pairs of two line files, of which `reader` reads the one of the source sides.

    Raises:
        UnreadableFileError: one of them is damaged, or they have different numbers of lines, so that it is not known
            which lines belong together; possibly after some pairs.
    """
    file = file_range.file
    assert file.target is not None and file_range.start == 0
    sources = targets = 0
    both = zip_longest(_lines(file, reader), _target_lines(file.target))
    for position, (source, target) in enumerate(both, start=1):
        sources += source is not None
        targets += target is not None
        if source is not None and target is not None:
            yield make_pair(decode_line(source[1], source[0], position), decode_line(target[1], target[0], position))
    if sources != targets:
        raise UnreadableFileError(f"{file.name} has {sources:,} lines and {file.target.name} {targets:,}")


def read_tsv(file_range: FileRange, reader: FileReader) -> Iterator[RawPair | BadDocument]:
    """Yield the pairs of a range of a .tsv file: UTF-8, without quoting, each line with as many columns as the first.

    Raises:
        UnreadableFileError: the first line lacks a column.
    """
    columns = file_range.file.fields
    assert columns is not None
    expected = _count_columns(file_range.file, reader)
    if 0 < expected < max(int(column) for column in columns):
        raise UnreadableFileError(f"no column {max(columns)}; its first line has {expected}")
    source, target, *relation = (int(column) - 1 for column in columns)
    numbered_lines = lines(
        range_bytes(file_range, reader), file_range.start, range_stop(file_range), MAX_DOCUMENT_BYTES
    )
    for position, (at, line) in enumerate(numbered_lines, start=1):
        text = decode_line(line, at, position)
        if isinstance(text, BadDocument):
            yield text
        elif not text or text.isspace():
            yield BadDocument(position, "empty")
        elif len(cells := text.split("\t")) != expected:
            yield BadDocument(position, f"{len(cells)} columns, the first line has {expected}")
        else:
            yield make_pair(cells[source], cells[target], cells[relation[0]] if relation else None, position)


def _lines(file: InputFile, reader: FileReader) -> Iterator[Line]:
    return lines(chunks(reader, file.compression, 0), 0, inf, MAX_DOCUMENT_BYTES)


def _target_lines(file: InputFile) -> Iterator[Line]:
    """Yield the lines of the second file; its name precedes the reason of its problems."""
    try:
        with FileReader(file) as reader:
            yield from _lines(file, reader)
            reader.check_unchanged()
    except UnreadableFileError as error:
        raise UnreadableFileError(f"{file.name}: {error}", error.transient) from None


def _count_columns(file: InputFile, reader: FileReader) -> int:
    """Return the number of columns of the first line; 0 if the file has no line or a too long one."""
    _, line = next(_lines(file, reader), (0, None))
    return 0 if line is None else line.count(b"\t") + 1
