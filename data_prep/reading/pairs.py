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


def read_line_files(part: FileRange, opened: FileReader) -> Iterator[RawPair | BadDocument]:
    """Yield the pairs of two line files, of which `opened` is the one of the source sides.

    Raises UnreadableFileError, possibly after some pairs, when one of them is damaged or they have different numbers of
    lines: then it is not known which lines belong together.
    """
    file = part.file
    assert file.target is not None and part.start == 0
    sources = targets = 0
    both = zip_longest(_lines(file, opened), _lines_of_second(file.target))
    for position, (source, target) in enumerate(both, start=1):
        sources += source is not None
        targets += target is not None
        if source is not None and target is not None:
            yield make_pair(decode_line(source[1], source[0], position), decode_line(target[1], target[0], position))
    if sources != targets:
        raise UnreadableFileError(f"{file.name} has {sources:,} lines and {file.target.name} {targets:,}")


def read_tsv(part: FileRange, opened: FileReader) -> Iterator[RawPair | BadDocument]:
    """Yield the pairs of a part of a .tsv file: UTF-8, without quoting, each line with as many columns as the first.

    Raises UnreadableFileError when the first line lacks a column.
    """
    columns = part.file.fields
    assert columns is not None
    expected = _columns(part.file, opened)
    if 0 < expected < max(int(column) for column in columns):
        raise UnreadableFileError(f"no column {max(columns)}; its first line has {expected}")
    source, target = (int(column) - 1 for column in columns)
    found = lines(range_bytes(part, opened), part.start, range_stop(part), MAX_DOCUMENT_BYTES)
    for position, (at, line) in enumerate(found, start=1):
        text = decode_line(line, at, position)
        if isinstance(text, BadDocument):
            yield text
        elif not text or text.isspace():
            yield BadDocument(position, "empty")
        elif len(cells := text.split("\t")) != expected:
            yield BadDocument(position, f"{len(cells)} columns, the first line has {expected}")
        else:
            yield cells[source], cells[target]


def _lines(file: InputFile, opened: FileReader) -> Iterator[Line]:
    return lines(chunks(opened, file.compression, 0), 0, inf, MAX_DOCUMENT_BYTES)


def _lines_of_second(file: InputFile) -> Iterator[Line]:
    """Yield the lines of the second file, whose problems are told with its name."""
    try:
        with FileReader(file) as opened:
            yield from _lines(file, opened)
            opened.check_unchanged()
    except UnreadableFileError as error:
        raise UnreadableFileError(f"{file.name}: {error}", error.transient) from None


def _columns(file: InputFile, opened: FileReader) -> int:
    """Columns of the file's first line; 0: it has no line, or one that is too long."""
    _, line = next(_lines(file, opened), (0, None))
    return 0 if line is None else line.count(b"\t") + 1
