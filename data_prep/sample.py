"""Which documents the tokenizer is trained on: those with the smallest hashes, found split by split.

A document's hash knows nothing of order or workers, so the sample is uniform over the corpus and always the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data_prep.dedup import held_out
from data_prep.documents import Kept, read_hashes


@dataclass(frozen=True)
class Candidates:
    """What one split, or several, have to choose from."""

    kept: int
    """Documents that are used."""
    held: int
    """Of these, held out."""
    smallest: np.ndarray
    """Of the others those with the smallest ids, ascending: first uint64 and bytes uint32."""


@dataclass(frozen=True)
class FindCandidates:
    """Look for a sample of `sample_bytes` in one split."""

    split: Kept
    heldout_fraction: float
    sample_bytes: int


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


def _smallest(documents: np.ndarray, sample_bytes: int) -> np.ndarray:
    """As many as fit into the sample, and at least one."""
    documents = documents[np.argsort(documents["first"], kind="stable")]
    fitting = np.searchsorted(np.cumsum(documents["bytes"], dtype=np.int64), sample_bytes, side="right")
    return documents[: max(1, int(fitting))]
