"""What readers yield: raw documents, raw pairs, and bad ones; and how they take texts from lines."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from multihop.data_prep.reading.compression import chunks
from multihop.data_prep.reading.file_reader import FileReader
from multihop.data_prep.reading.sources import FileRange

MAX_DOCUMENT_BYTES = 64 * 2**20

TOO_LONG = "longer than 64 MiB"
NOT_UTF8 = "not UTF-8"
NUL = "NUL bytes"
"""Text has none; UTF-16 that happens to be valid UTF-8 does."""

RawPair = tuple[str, str]
"""Source and target."""
RawDocument = str | RawPair
"""A document or a pair."""


@dataclass(frozen=True)
class BadDocument:
    """A document or pair that cannot be read."""

    position: int
    """Line (.jsonl, .tsv, two line files), item (.json), row (.parquet, .arrow) or document (.txt), counted from 1 in
    the part."""
    reason: str


def range_bytes(part: FileRange, opened: FileReader) -> Iterator[bytes]:
    """Yield the bytes from the one before the part on, which decides whether a line begins at the part's start."""
    return chunks(opened, part.file.compression, max(0, part.start - 1))


def range_stop(part: FileRange) -> float:
    """Where the lines of a part must have begun, in bytes of the unpacked file."""
    return inf if part.file.compression else part.stop


def decode_line(line: bytes | None, at: int, position: int) -> str | BadDocument:
    """Return the text of a line at byte `at` of the unpacked file; None: it is too long."""
    if line is None:
        return BadDocument(position, TOO_LONG)
    if b"\0" in line:
        return BadDocument(position, NUL)
    try:
        return line.decode("utf-8" if at else "utf-8-sig")
    except UnicodeDecodeError:
        return BadDocument(position, NOT_UTF8)


def make_pair(source: str | BadDocument, target: str | BadDocument) -> RawPair | BadDocument:
    """Return the pair of two sides, or the first bad one."""
    if isinstance(source, BadDocument):
        return source
    return target if isinstance(target, BadDocument) else (source, target)
