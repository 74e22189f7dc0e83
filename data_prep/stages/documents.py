"""The stage that reads, cleans, filters and hashes the documents of a split, and the readers of its outputs.

A pair is a document whose text is its source, a tab, and its target; see `multihop.data_prep.rules.pairs`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from multihop.common.machine import raise_mmap_threshold
from multihop.data_prep.config import CleanConfig, FilterConfig
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.raw import MAX_DOCUMENT_BYTES, TOO_LONG, BadDocument, RawDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import FileRange
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.filters import DroppedDocument, make_filter
from multihop.data_prep.rules.pairs import clean_side, join_sides, make_pair_filter
from multihop.data_prep.stages.outputs import Output, read_batch, read_batches, write_batches, write_once

BATCH_BYTES = 4 * 2**20
SCHEMA = pa.schema(
    [
        pa.field("first", pa.uint64(), nullable=False),
        pa.field("second", pa.uint64(), nullable=False),
        pa.field("bytes", pa.uint32(), nullable=False),
        pa.field("source", pa.uint16(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ]
)
_NAMED_PER_RANGE = 20
_PrepareDocument = Callable[[RawDocument, int], str | BadDocument | DroppedDocument]
"""(raw text or pair, position) -> the document's text, or why it is not used."""


@dataclass(frozen=True)
class ReadSplit:
    """Read ranges of files; their documents go to FOLDER/KEY.arrow, recorded in FOLDER/KEY.json."""

    key: str
    folder: str
    ranges: list[FileRange]
    clean: CleanConfig
    filters: FilterConfig


@dataclass(frozen=True)
class Selection:
    """Selects the documents of a split that are not dropped."""

    path: str
    sha256: str
    documents: int
    """Number of selected documents."""
    dropped: np.ndarray
    """int64, ascending: dropped rows of the file."""


@dataclass
class _Tally:
    """Counts the outcomes of reading a range; its fields are the metadata in `read_split`'s entries."""

    documents: int = 0
    places: int = 0
    """Number of lines, items or rows read."""
    unreadable: str | None = None
    """The reason why the file was set aside."""
    for_now: bool = False
    """True if the file was gone or changing, so that a later start reads it again."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Documents dropped by filters, by reason."""
    bad: Counter[str] = field(default_factory=Counter)
    named: list[tuple[int, str]] = field(default_factory=list)
    """The positions of the first bad documents, with their reasons."""


def read_split(split: ReadSplit) -> Output:
    """Write the good documents of a split, cleaned, filtered and hashed, into an Arrow file of SCHEMA.

    Metadata: "parts", the fields of `_Tally` for each of `split.ranges`.
    """
    raise_mmap_threshold()
    folder = Path(split.folder)
    entry = folder / f"{split.key}.json"

    def write(path: Path) -> dict[str, Any]:
        prepare_document = _make_prepare_document(split)
        tallies = [_Tally() for _ in split.ranges]
        while True:
            try:
                write_batches(path, SCHEMA, _batches(split.ranges, tallies, prepare_document), "lz4")
            except _PartlyWrittenError:
                # Rare, and cheaper than reading every file twice to check it first.
                tallies = [tally if tally.unreadable else _Tally() for tally in tallies]
            else:
                return {"parts": [vars(tally) for tally in tallies]}

    output = write_once(entry, folder / f"{split.key}.arrow", write)
    if any(part["for_now"] for part in output.metadata["parts"]):
        entry.unlink()
    return output


def content_hash(text: str) -> tuple[int, int]:
    """Return the first two 8-byte words of the SHA-256 of a cleaned document.

    The first is the document's id; the second decides whether it is held out, so that the two are independent. A
    fragment of a document has the document's second word: both are on the same side of the split.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]), int.from_bytes(digest[8:16])


def heldout_mask(second: np.ndarray, fraction: float) -> np.ndarray:
    """Return bool (n,): true for held-out documents.

    Args:
        second: uint64 (n,), the second words of `content_hash`.
        fraction: the share to hold out.
    """
    return second < np.uint64(int(fraction * 2**64))


def read_hashes(path: str) -> np.ndarray:
    """Return a structured array (documents,) of first uint64, second uint64 and bytes uint32; does not read texts."""
    batches = []
    for batch in read_batches(path, columns=[0, 1, 2]):
        hashes = np.empty(batch.num_rows, dtype=[("first", "u8"), ("second", "u8"), ("bytes", "u4")])
        for name in ("first", "second", "bytes"):
            hashes[name] = batch.column(name).to_numpy()
        batches.append(hashes)
    empty = np.empty(0, dtype=[("first", "u8"), ("second", "u8"), ("bytes", "u4")])
    return np.concatenate([empty, *batches])


def read_documents(path: str, dropped: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Yield the documents of a split in batches, without the rows `dropped` (int64, ascending)."""
    start = 0
    for batch in read_batches(path):
        stop = start + batch.num_rows
        keep = np.ones(batch.num_rows, dtype=bool)
        keep[dropped[np.searchsorted(dropped, start) : np.searchsorted(dropped, stop)] - start] = False
        yield batch if keep.all() else batch.filter(pa.array(keep))
        start = stop


def read_rows(path: str, rows: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Yield the documents of a split in `rows` (int64, ascending); other batches are not decompressed."""
    start = 0
    for number, hashes in enumerate(read_batches(path, columns=[0])):
        stop = start + hashes.num_rows
        within = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
        if len(within):
            yield read_batch(path, number).take(pa.array(within))
        start = stop


def _batches(
    ranges: list[FileRange], tallies: list[_Tally], prepare_document: _PrepareDocument
) -> Iterator[pa.RecordBatch]:
    rows: list[tuple[int, int, int, int, str]] = []
    size = 0
    for row in _rows(ranges, tallies, prepare_document):
        rows.append(row)
        size += row[2]
        if size >= BATCH_BYTES:
            yield _batch(rows)
            rows, size = [], 0
    if rows:
        yield _batch(rows)


def _batch(rows: list[tuple[int, int, int, int, str]]) -> pa.RecordBatch:
    columns = [pa.array(column, type=kind.type) for column, kind in zip(zip(*rows, strict=True), SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class _PartlyWrittenError(Exception):
    """Documents of a file were written before it turned out to be unreadable; the tallies name it."""


def _rows(
    ranges: list[FileRange], tallies: list[_Tally], prepare_document: _PrepareDocument
) -> Iterator[tuple[int, int, int, int, str]]:
    """Yield the documents of all ranges except those marked unreadable in the tallies."""
    partly_written = False
    for index, file_range in enumerate(ranges):
        tally = tallies[index]
        if tally.unreadable:
            continue
        try:
            for raw in read_range(file_range):
                tally.places += 1
                if partly_written:
                    continue  # only checks the other files before everything is written again
                document = raw if isinstance(raw, BadDocument) else prepare_document(raw, tally.places)
                if isinstance(document, DroppedDocument):
                    tally.filtered[document.reason] += 1
                elif isinstance(document, BadDocument):
                    tally.bad[document.reason] += 1
                    if len(tally.named) < _NAMED_PER_RANGE:
                        tally.named.append((document.position, document.reason))
                else:
                    tally.documents += 1
                    yield (*content_hash(document), len(document.encode()), file_range.file.source, document)
        except UnreadableFileError as error:
            partly_written = partly_written or tally.documents > 0
            tallies[index] = _Tally(unreadable=str(error), for_now=error.transient)
    if partly_written:
        raise _PartlyWrittenError


def _make_prepare_document(split: ReadSplit) -> _PrepareDocument:
    fix_mojibake = split.clean.fix_mojibake
    keep = make_filter(split.filters) if split.filters != FilterConfig() else None
    drop = None if split.filters.pairs is None else make_pair_filter(split.filters.pairs)

    def prepare_document(raw: RawDocument, position: int) -> str | BadDocument | DroppedDocument:
        if isinstance(raw, str):
            text = clean(raw, fix_mojibake)
            if not text:
                return BadDocument(position, "empty")
            return _unusable(text, position) or (text if keep is None else keep(text))
        source, target = (clean_side(side, fix_mojibake) for side in raw)
        if not source and not target:
            return DroppedDocument("both sides empty")  # as two line files have it between documents
        if not source or not target:
            return BadDocument(position, "empty target" if source else "empty source")
        text = join_sides(source, target)
        if bad := _unusable(text, position):
            return bad
        reason = None if drop is None else drop(source, target)
        return text if reason is None else DroppedDocument(reason)

    return prepare_document


def _unusable(text: str, position: int) -> BadDocument | None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        return BadDocument(position, "not Unicode")
    return BadDocument(position, TOO_LONG) if size > MAX_DOCUMENT_BYTES else None
