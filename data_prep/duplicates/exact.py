"""Finds exact copies over the whole corpus: sorts each split's ids once, and merges ranges of ids.

No task holds a table of all documents: each one sees the documents of one range, from all splits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from multihop.data_prep.stages.documents import Selection, read_hashes
from multihop.data_prep.stages.outputs import Output, write_batches, write_once

RANGE_DOCUMENTS = 2**23
"""Approximate documents of a range; merging it takes about 400 MB."""
_RUN = pa.schema([pa.field(name, kind, nullable=False) for name, kind in
                  (("first", pa.uint64()), ("bytes", pa.uint32()), ("row", pa.uint32()))])  # fmt: skip
_DROPPED = pa.schema([pa.field("split", pa.uint32(), nullable=False), pa.field("row", pa.uint32(), nullable=False)])


@dataclass(frozen=True)
class SortHashes:
    """Sort the ids of the remaining documents of a split."""

    key: str
    folder: str
    selection: Selection


@dataclass(frozen=True)
class FindCopies:
    """Find the copies among the documents whose id is in [low, high], over all `runs`."""

    key: str
    folder: str
    runs: tuple[str, ...]
    low: int
    high: int


def sort_hashes(item: SortHashes) -> Output:
    """Write a sorted run as FOLDER/KEY.arrow: id, bytes and row of a split's documents, sorted in this order.

    Holds 40 bytes a document of the split.
    """

    def write(path: Path) -> dict[str, Any]:
        hashes = read_hashes(item.selection.path)
        rows = np.delete(np.arange(len(hashes), dtype=np.uint32), item.selection.dropped)
        kept = hashes[rows]
        order = np.lexsort((kept["bytes"], kept["first"]))  # stable: copies stay in the order of their rows
        columns = [kept["first"][order], kept["bytes"][order], rows[order]]
        write_batches(path, _RUN, iter([pa.RecordBatch.from_arrays(list(map(pa.array, columns)), schema=_RUN)]), None)
        return {"documents": len(order)}

    folder = Path(item.folder)
    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def find_copies(item: FindCopies) -> Output:
    """Write split and row of all but the first copy, in the order of the input, as FOLDER/KEY.arrow."""

    def write(path: Path) -> dict[str, Any]:
        columns_of_runs = [_within(run, item.low, item.high) for run in item.runs]
        split = np.repeat(np.arange(len(item.runs), dtype=np.uint32), [len(columns[0]) for columns in columns_of_runs])
        first, size, row = (np.concatenate(column) for column in zip(*columns_of_runs, strict=True))
        copies = ~first_occurrence_mask(first, size)
        columns = [pa.array(split[copies]), pa.array(row[copies])]
        write_batches(path, _DROPPED, iter([pa.RecordBatch.from_arrays(columns, schema=_DROPPED)]), None)
        return {"copies": int(copies.sum())}

    folder = Path(item.folder)
    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def first_occurrence_mask(first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return bool (n,): true for the first of equal documents, in the order of sources, file names and positions.

    Documents of the same id and size count as equal. With 10^10 documents of a thousand different sizes, one is dropped
    by mistake with a probability of about 1/400.

    Args:
        first: uint64 (n,), ids, in the order of the input.
        size: uint32 (n,), bytes.
    """
    order = np.lexsort((size, first))  # stable: copies stay in the order of the input
    same = (first[order[1:]] == first[order[:-1]]) & (size[order[1:]] == size[order[:-1]])
    keep = np.ones(len(first), dtype=bool)
    keep[order[1:][same]] = False
    return keep


def hash_ranges(documents: int, range_documents: int = RANGE_DOCUMENTS) -> Iterator[tuple[int, int]]:
    """Yield inclusive bounds (low, high) of equal ranges of a 64-bit hash, of about `range_documents` documents."""
    ranges = max(1, -(-documents // range_documents))
    bounds = [2**64 * i // ranges for i in range(ranges + 1)]
    yield from ((low, high - 1) for low, high in pairwise(bounds))


def rows_by_split(paths: Sequence[str], splits: int) -> list[np.ndarray]:
    """Read the rows of each split, int64 ascending, from the files `paths` with columns split and row."""
    tables = [_columns(path) for path in paths]
    split = np.concatenate([np.empty(0, np.uint32), *(table[0] for table in tables)])
    row = np.concatenate([np.empty(0, np.uint32), *(table[1] for table in tables)])
    order = np.lexsort((row, split))
    bounds = np.searchsorted(split[order], np.arange(1, splits))
    return [rows.astype(np.int64) for rows in np.split(row[order], bounds)]


def _within(run: str, low: int, high: int) -> list[np.ndarray]:
    columns = _columns(run)
    start = np.searchsorted(columns[0], np.uint64(low), side="left")
    stop = np.searchsorted(columns[0], np.uint64(high), side="right")
    return [column[start:stop] for column in columns]


def _columns(path: str) -> list[np.ndarray]:
    """Map the columns of a file of one batch."""
    with pa.memory_map(path) as mapped:
        batch = pa.ipc.open_file(mapped).get_batch(0)
    return [column.to_numpy(zero_copy_only=True) for column in batch.columns]
