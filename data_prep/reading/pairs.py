"""Reads pairs from two line files, and from the columns of .tsv files."""

from collections.abc import Iterator
from itertools import zip_longest
from math import inf

from multihop.data_prep.reading.compression import chunks
from multihop.data_prep.reading.failures import UnreadableFileError
from multihop.data_prep.reading.lines import Line, lines
from multihop.data_prep.reading.opening import OpenedFile
from multihop.data_prep.reading.raw import MAX_DOCUMENT_BYTES, Bad, Pair, bytes_of, pair_of, stop_of, text_of
from multihop.data_prep.reading.sources import InputFile, Part


def read_line_files(part: Part, opened: OpenedFile) -> Iterator[Pair | Bad]:
    """The pairs of two line files, of which `opened` is the one of the source sides.

    Raises UnreadableFileError, possibly after some pairs, when one of them is damaged or they have different numbers of
    lines: then it is not known which lines belong together.
    """
    file = part.file
    assert file.target is not None and part.start == 0
    sources = targets = 0
    both = zip_longest(_lines(file, opened), _lines_of_second(file.target))
    for place, (source, target) in enumerate(both, start=1):
        sources += source is not None
        targets += target is not None
        if source is not None and target is not None:
            yield pair_of(text_of(source[1], source[0], place), text_of(target[1], target[0], place))
    if sources != targets:
        raise UnreadableFileError(f"{file.name} has {sources:,} lines and {file.target.name} {targets:,}")


def read_tsv(part: Part, opened: OpenedFile) -> Iterator[Pair | Bad]:
    """The pairs of a part of a .tsv file: UTF-8, without quoting, each line with as many columns as the first.

    Raises UnreadableFileError when the first line lacks a column.
    """
    columns = part.file.fields
    assert columns is not None
    expected = _columns(part.file, opened)
    if 0 < expected < max(int(column) for column in columns):
        raise UnreadableFileError(f"no column {max(columns)}; its first line has {expected}")
    source, target = (int(column) - 1 for column in columns)
    found = lines(bytes_of(part, opened), part.start, stop_of(part), MAX_DOCUMENT_BYTES)
    for place, (at, line) in enumerate(found, start=1):
        text = text_of(line, at, place)
        if isinstance(text, Bad):
            yield text
        elif not text or text.isspace():
            yield Bad(place, "empty")
        elif len(cells := text.split("\t")) != expected:
            yield Bad(place, f"{len(cells)} columns, the first line has {expected}")
        else:
            yield cells[source], cells[target]


def _lines(file: InputFile, opened: OpenedFile) -> Iterator[Line]:
    return lines(chunks(opened, file.packing, 0), 0, inf, MAX_DOCUMENT_BYTES)


def _lines_of_second(file: InputFile) -> Iterator[Line]:
    """The lines of the second file, whose problems are told with its name."""
    try:
        with OpenedFile(file) as opened:
            yield from _lines(file, opened)
            opened.check_unchanged()
    except UnreadableFileError as error:
        raise UnreadableFileError(f"{file.name}: {error}", error.for_now) from None


def _columns(file: InputFile, opened: OpenedFile) -> int:
    """Columns of the file's first line; 0: it has no line, or one that is too long."""
    _, line = next(_lines(file, opened), (0, None))
    return 0 if line is None else line.count(b"\t") + 1
