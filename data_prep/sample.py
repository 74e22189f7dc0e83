"""The documents that the tokenizer is trained on: those with the smallest hashes, found and drawn split by split.

A document's hash knows nothing of order or workers, so the sample is uniform over the corpus and always the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.content import held_out
from data_prep.documents import SCHEMA, Kept, read_hashes, read_rows
from data_prep.stages import Output, once, read_batches, write_batches


@dataclass(frozen=True)
class Candidates:
    """What one split, or several, have to choose from."""

    kept: int
    """Documents that are used."""
    held: int
    """Of these, held out."""
    smallest: np.ndarray
    """Of the others those with the smallest ids, ascending: first uint64 and bytes uint32. The last one does not fit
    into the sample any more: none behind it does, whatever other splits have."""


@dataclass(frozen=True)
class FindCandidates:
    """Look for a sample of `sample_bytes` in one split."""

    split: Kept
    heldout_fraction: float
    sample_bytes: int


@dataclass(frozen=True)
class DrawSample:
    """Take the documents of one split that are not held out and whose id is at most `largest_id`."""

    key: str
    folder: str
    split: Kept
    heldout_fraction: float
    largest_id: int


def find_candidates(item: FindCandidates) -> Candidates:
    """Of one split. Holds 20 bytes a document of it."""
    hashes = np.delete(read_hashes(item.split.path), item.split.dropped)
    held = held_out(hashes["second"], item.heldout_fraction)
    train = hashes[~held][["first", "bytes"]]
    return Candidates(len(hashes), int(held.sum()), _smallest(train, item.sample_bytes))


def merge(found: Iterable[Candidates], sample_bytes: int) -> Candidates:
    """Of all splits, in any order; holds no more than the sample and one split's candidates."""
    merged = Candidates(0, 0, np.empty(0, dtype=[("first", "u8"), ("bytes", "u4")]))
    for some in found:
        smallest = _smallest(np.concatenate([merged.smallest, some.smallest]), sample_bytes)
        merged = Candidates(merged.kept + some.kept, merged.held + some.held, smallest)
    return merged


def draw_sample(item: DrawSample) -> Output:
    """The sample's documents of one split, as FOLDER/KEY.arrow."""

    def write(path: Path) -> dict[str, Any]:
        hashes = read_hashes(item.split.path)
        chosen = (hashes["first"] <= np.uint64(item.largest_id)) & ~held_out(hashes["second"], item.heldout_fraction)
        chosen[item.split.dropped] = False
        write_batches(path, SCHEMA, read_rows(item.split.path, np.flatnonzero(chosen)), "lz4")
        return {"documents": int(chosen.sum()), "bytes": int(hashes["bytes"][chosen].sum(dtype=np.int64))}

    folder = Path(item.folder)
    return once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def texts_of(drawn: Iterable[str]) -> Iterator[tuple[str, int]]:
    """The sample's texts, each with the number of its source, by their ids; holds all of them.

    That order does not depend on the splits that they were drawn from.
    """
    batches = [batch for path in drawn for batch in read_batches(path)]
    documents = pa.Table.from_batches(batches, SCHEMA).sort_by([("first", "ascending"), ("second", "ascending")])
    for batch in documents.to_batches(max_chunksize=1024):
        yield from zip(batch.column("text").to_pylist(), batch.column("source").to_pylist(), strict=True)


def largest_id(found: Candidates, sample_bytes: int) -> int:
    """The id up to which documents are in the sample: as many as fit, and at least one."""
    fitting = np.searchsorted(np.cumsum(found.smallest["bytes"], dtype=np.int64), sample_bytes, side="right")
    return int(found.smallest["first"][max(1, int(fitting)) - 1])


def _smallest(documents: np.ndarray, sample_bytes: int) -> np.ndarray:
    """As many as fit, and the first that does not."""
    documents = documents[np.argsort(documents["first"], kind="stable")]
    fitting = np.searchsorted(np.cumsum(documents["bytes"], dtype=np.int64), sample_bytes, side="right")
    return documents[: fitting + 1]
