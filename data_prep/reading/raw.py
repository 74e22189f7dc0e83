"""Types that readers yield, raw documents, raw pairs and bad ones, and the decoding of lines."""

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
"""The reason for bytes that text does not have, but UTF-16 that happens to be valid UTF-8 does."""

RawPair = tuple[str, str]
"""The source and the target side."""
RawDocument = str | RawPair
"""A document or a pair."""


@dataclass(frozen=True)
class BadDocument:
    """Reports a document or pair that cannot be read."""

    position: int
    """Line (.jsonl, .tsv, two line files), item (.json), row (.parquet, .arrow) or document (.txt), counted from 1 in
    the range."""
    reason: str


def range_bytes(file_range: FileRange, reader: FileReader) -> Iterator[bytes]:
    """Yield the bytes from the one before the range on, which decides whether a line begins at the range's start."""
    return chunks(reader, file_range.file.compression, max(0, file_range.start - 1))


def range_stop(file_range: FileRange) -> float:
    """Return the offset in the decompressed file before which the lines of a range must begin."""
    return inf if file_range.file.compression else file_range.stop


def decode_line(line: bytes | None, offset: int, position: int) -> str | BadDocument:
    """Decode a line at byte `offset` of the decompressed file; None is a line that is too long."""
    if line is None:
        return BadDocument(position, TOO_LONG)
    if b"\0" in line:
        return BadDocument(position, NUL)
    try:
        return line.decode("utf-8" if offset else "utf-8-sig")
    except UnicodeDecodeError:
        return BadDocument(position, NOT_UTF8)


def make_pair(
    source: str | BadDocument, target: str | BadDocument, relation: str | BadDocument | None = None, position: int = 0
) -> RawPair | BadDocument:
    """Return the pair of two sides, or the first bad one; with a relation the source is "head <relation>".

    Args:
        relation: of a triple, whose head and tail are `source` and `target`; None: it is a pair.
        position: as in `BadDocument`; of triples.
    """
    for part in (source, target, relation):
        if isinstance(part, BadDocument):
            return part
    assert isinstance(source, str) and isinstance(target, str) and not isinstance(relation, BadDocument)
    if relation is None:
        return source, target
    if not relation.strip():
        return BadDocument(position, "empty relation")
    return (f"{source} {relation_token(relation)}" if source.strip() else ""), target


def relation_token(relation: str) -> str:
    """Return the spelling of a relation in a source, which `tokenizer.added_tokens` makes one token: "<is_a>"."""
    return f"<{'_'.join(relation.split())}>"
