"""What readers yield: raw documents, raw pairs, and bad ones; and how they take texts from lines."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from multihop.data_prep.reading.compression import chunks
from multihop.data_prep.reading.opening import OpenedFile
from multihop.data_prep.reading.sources import Part

MAX_DOCUMENT_BYTES = 64 * 2**20

TOO_LONG = "longer than 64 MiB"
NOT_UTF8 = "not UTF-8"
NUL = "NUL bytes"
"""Text has none; UTF-16 that happens to be valid UTF-8 does."""

Pair = tuple[str, str]
"""Source and target."""
Raw = str | Pair
"""A document or a pair."""


@dataclass(frozen=True)
class Bad:
    """A document or pair that cannot be read."""

    place: int
    """Line (.jsonl, .tsv, two line files), item (.json), row (.parquet, .arrow) or document (.txt), counted from 1 in
    the part."""
    reason: str


def bytes_of(part: Part, opened: OpenedFile) -> Iterator[bytes]:
    """The bytes from the one before the part on, which decides whether a line begins at the part's start."""
    return chunks(opened, part.file.packing, max(0, part.start - 1))


def stop_of(part: Part) -> float:
    """Where the lines of a part must have begun, in bytes of the unpacked file."""
    return inf if part.file.packing else part.stop


def text_of(line: bytes | None, at: int, place: int) -> str | Bad:
    """The text of a line at byte `at` of the unpacked file; None: it is too long."""
    if line is None:
        return Bad(place, TOO_LONG)
    if b"\0" in line:
        return Bad(place, NUL)
    try:
        return line.decode("utf-8" if at else "utf-8-sig")
    except UnicodeDecodeError:
        return Bad(place, NOT_UTF8)


def pair_of(source: str | Bad, target: str | Bad) -> Pair | Bad:
    """The pair of two sides, or the first bad one."""
    if isinstance(source, Bad):
        return source
    return target if isinstance(target, Bad) else (source, target)
