"""Samples the documents that the tokenizer is trained on: those with the smallest hashes, split by split.

A document's hash does not depend on order or workers, so the sample is uniform over the corpus and deterministic.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from multihop.data_prep.stages.content import held_out
from multihop.data_prep.stages.documents import SCHEMA, Kept, read_hashes, read_rows
from multihop.data_prep.stages.outputs import Output, once, read_batches, write_batches


@dataclass(frozen=True)
class Candidates:
    """Candidates for the sample, of one split or several."""

    kept: int
    """Number of documents."""
    held: int
    """How many of them are held out."""
    smallest: np.ndarray
    """The train documents with the smallest ids, ascending: first uint64, bytes uint32. All but the last one fit into
    the sample, so no document after it is in the sample, whatever other splits have."""


@dataclass(frozen=True)
class FindCandidates:
    """Find candidates for a sample of `sample_bytes` in a split."""

    split: Kept
    heldout_fraction: float
    sample_bytes: int


@dataclass(frozen=True)
class DrawSample:
    """Take the train documents of a split whose id is at most `largest_id`."""

    key: str
    folder: str
    split: Kept
    heldout_fraction: float
    largest_id: int


def find_candidates(item: FindCandidates) -> Candidates:
    """The candidates of a split. Memory: 20 bytes per document."""
    hashes = np.delete(read_hashes(item.split.path), item.split.dropped)
    held = held_out(hashes["second"], item.heldout_fraction)
    train = hashes[~held][["first", "bytes"]]
    return Candidates(len(hashes), int(held.sum()), _smallest(train, item.sample_bytes))


def merge(found: Iterable[Candidates], sample_bytes: int) -> Candidates:
    """The candidates of all splits, in any order. Holds at most the sample and one split's candidates."""
    merged = Candidates(0, 0, np.empty(0, dtype=[("first", "u8"), ("bytes", "u4")]))
    for some in found:
        smallest = _smallest(np.concatenate([merged.smallest, some.smallest]), sample_bytes)
        merged = Candidates(merged.kept + some.kept, merged.held + some.held, smallest)
    return merged


def draw_sample(item: DrawSample) -> Output:
    """Write the sample's documents of a split to FOLDER/KEY.arrow."""

    def write(path: Path) -> dict[str, Any]:
        hashes = read_hashes(item.split.path)
        chosen = (hashes["first"] <= np.uint64(item.largest_id)) & ~held_out(hashes["second"], item.heldout_fraction)
        chosen[item.split.dropped] = False
        write_batches(path, SCHEMA, read_rows(item.split.path, np.flatnonzero(chosen)), "lz4")
        return {"documents": int(chosen.sum()), "bytes": int(hashes["bytes"][chosen].sum(dtype=np.int64))}

    folder = Path(item.folder)
    return once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def texts_of(drawn: Iterable[str]) -> Iterator[tuple[str, int]]:
    """The sample's texts, each with the index of its source, sorted by id, independent of splits; holds all of them."""
    batches = [batch for path in drawn for batch in read_batches(path)]
    documents = pa.Table.from_batches(batches, SCHEMA).sort_by([("first", "ascending"), ("second", "ascending")])
    for batch in documents.to_batches(max_chunksize=1024):
        yield from zip(batch.column("text").to_pylist(), batch.column("source").to_pylist(), strict=True)


def largest_id(found: Candidates, sample_bytes: int) -> int:
    """The largest id in the sample: as many documents as fit, and at least one."""
    fitting = np.searchsorted(np.cumsum(found.smallest["bytes"], dtype=np.int64), sample_bytes, side="right")
    return int(found.smallest["first"][max(1, int(fitting)) - 1])


def _smallest(documents: np.ndarray, sample_bytes: int) -> np.ndarray:
    """The documents with the smallest ids that fit, and the first one that does not."""
    documents = documents[np.argsort(documents["first"], kind="stable")]
    fitting = np.searchsorted(np.cumsum(documents["bytes"], dtype=np.int64), sample_bytes, side="right")
    return documents[: fitting + 1]
