"""The stage that reads, cleans, filters and hashes the documents of a split, and the readers of its outputs.

A pair is a document whose text is its source, a tab, and its target; see `multihop.data_prep.rules.pairs`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from multihop.common.malloc import raise_mmap_threshold
from multihop.data_prep.config import CleanConfig, FilterConfig
from multihop.data_prep.reading.failures import UnreadableFileError
from multihop.data_prep.reading.raw import MAX_DOCUMENT_BYTES, TOO_LONG, Bad, Raw
from multihop.data_prep.reading.readers import read_part
from multihop.data_prep.reading.sources import Part
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.filters import Dropped, make_filter
from multihop.data_prep.rules.pairs import clean_side, join_sides, make_pair_filter
from multihop.data_prep.stages.content import content_hash
from multihop.data_prep.stages.outputs import Output, once, read_batch, read_batches, write_batches

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
_NAMED_PER_PART = 20
_Prepare = Callable[[Raw, int], str | Bad | Dropped]
"""(raw text or pair, place) -> the document's text, or why it is not used."""


@dataclass(frozen=True)
class ReadSplit:
    """Read parts of files; their documents go to FOLDER/KEY.arrow, entered as FOLDER/KEY.json."""

    key: str
    folder: str
    parts: list[Part]
    clean: CleanConfig
    filters: FilterConfig


@dataclass(frozen=True)
class Kept:
    """A split's documents without the dropped ones."""

    path: str
    sha256: str
    documents: int
    """Number of kept documents."""
    dropped: np.ndarray
    """int64, ascending: dropped rows of the file."""


@dataclass
class _Tally:
    """The outcome of reading a part."""

    documents: int = 0
    places: int = 0
    """Lines, items or rows read."""
    unreadable: str | None = None
    """Why the file was set aside."""
    for_now: bool = False
    """The file was gone or changing: a later start reads it again."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Documents dropped by filters, by reason."""
    bad: Counter[str] = field(default_factory=Counter)
    named: list[tuple[int, str]] = field(default_factory=list)
    """The first bad places, with their reasons."""


def read_split(split: ReadSplit) -> Output:
    """Write the good documents of a split, cleaned, filtered and hashed, into an Arrow file of SCHEMA.

    Facts: "parts", the fields of `_Tally` for each of `split.parts`.
    """
    raise_mmap_threshold()
    folder = Path(split.folder)
    entry = folder / f"{split.key}.json"

    def write(path: Path) -> dict[str, Any]:
        prepare = _preparation(split)
        tallies = [_Tally() for _ in split.parts]
        while True:
            try:
                write_batches(path, SCHEMA, _batches(split.parts, tallies, prepare), "lz4")
            except _SpoiltError:
                # Rare, and cheaper than reading every file twice to check it first.
                tallies = [tally if tally.unreadable else _Tally() for tally in tallies]
            else:
                return {"parts": [vars(tally) for tally in tallies]}

    output = once(entry, folder / f"{split.key}.arrow", write)
    if any(part["for_now"] for part in output.facts["parts"]):
        entry.unlink()
    return output


def read_hashes(path: str) -> np.ndarray:
    """Structured array (documents,) of first uint64, second uint64 and bytes uint32; does not read the texts."""
    parts = []
    for batch in read_batches(path, columns=[0, 1, 2]):
        part = np.empty(batch.num_rows, dtype=[("first", "u8"), ("second", "u8"), ("bytes", "u4")])
        for name in ("first", "second", "bytes"):
            part[name] = batch.column(name).to_numpy()
        parts.append(part)
    empty = np.empty(0, dtype=[("first", "u8"), ("second", "u8"), ("bytes", "u4")])
    return np.concatenate([empty, *parts])


def read_documents(path: str, dropped: np.ndarray) -> Iterator[pa.RecordBatch]:
    """The documents of a split in batches, without the rows `dropped` (int64, ascending)."""
    start = 0
    for batch in read_batches(path):
        stop = start + batch.num_rows
        keep = np.ones(batch.num_rows, dtype=bool)
        keep[dropped[np.searchsorted(dropped, start) : np.searchsorted(dropped, stop)] - start] = False
        yield batch if keep.all() else batch.filter(pa.array(keep))
        start = stop


def read_rows(path: str, rows: np.ndarray) -> Iterator[pa.RecordBatch]:
    """The documents of a split in `rows` (int64, ascending); other batches are not decompressed."""
    start = 0
    for number, hashes in enumerate(read_batches(path, columns=[0])):
        stop = start + hashes.num_rows
        within = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
        if len(within):
            yield read_batch(path, number).take(pa.array(within))
        start = stop


def _batches(parts: list[Part], tallies: list[_Tally], prepare: _Prepare) -> Iterator[pa.RecordBatch]:
    rows: list[tuple[int, int, int, int, str]] = []
    size = 0
    for row in _rows(parts, tallies, prepare):
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


class _SpoiltError(Exception):
    """Documents were written of a file that turned out to be unreadable; the tallies say which."""


def _rows(parts: list[Part], tallies: list[_Tally], prepare: _Prepare) -> Iterator[tuple[int, int, int, int, str]]:
    """The documents of all parts except those marked unreadable in the tallies."""
    spoilt = False
    for index, part in enumerate(parts):
        tally = tallies[index]
        if tally.unreadable:
            continue
        try:
            for raw in read_part(part):
                tally.places += 1
                if spoilt:
                    continue  # only checks the other files before everything is written again
                document = raw if isinstance(raw, Bad) else prepare(raw, tally.places)
                if isinstance(document, Dropped):
                    tally.filtered[document.reason] += 1
                elif isinstance(document, Bad):
                    tally.bad[document.reason] += 1
                    if len(tally.named) < _NAMED_PER_PART:
                        tally.named.append((document.place, document.reason))
                else:
                    tally.documents += 1
                    yield (*content_hash(document), len(document.encode()), part.file.source, document)
        except UnreadableFileError as error:
            spoilt = spoilt or tally.documents > 0
            tallies[index] = _Tally(unreadable=str(error), for_now=error.for_now)
    if spoilt:
        raise _SpoiltError


def _preparation(split: ReadSplit) -> _Prepare:
    fix_mojibake = split.clean.fix_mojibake
    keep = make_filter(split.filters) if split.filters != FilterConfig() else None
    drop = None if split.filters.pairs is None else make_pair_filter(split.filters.pairs)

    def prepare(raw: Raw, place: int) -> str | Bad | Dropped:
        if isinstance(raw, str):
            text = clean(raw, fix_mojibake)
            if not text:
                return Bad(place, "empty")
            return _unusable(text, place) or (text if keep is None else keep(text))
        source, target = (clean_side(side, fix_mojibake) for side in raw)
        if not source and not target:
            return Dropped("both sides empty")  # as two line files have it between documents
        if not source or not target:
            return Bad(place, "empty target" if source else "empty source")
        text = join_sides(source, target)
        if bad := _unusable(text, place):
            return bad
        reason = None if drop is None else drop(source, target)
        return text if reason is None else Dropped(reason)

    return prepare


def _unusable(text: str, place: int) -> Bad | None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        return Bad(place, "not Unicode")
    return Bad(place, TOO_LONG) if size > MAX_DOCUMENT_BYTES else None
