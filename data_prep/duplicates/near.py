"""Finds near duplicates over the whole corpus: MinHash signatures, candidates by bands (LSH), clusters.

    sign_split        signatures of a split's documents, and each band's hashes sorted     a split: signature_files.py
    candidate_pairs   equal hashes of all splits, checked by the whole signatures          a band and a range of hashes
    find_clusters     connected components of these pairs; all but one document dropped    once

A signed split is a sorted run of each band: a range of hashes is a slice of it, found by bisection and memory-mapped,
so no table of all documents is ever in memory and no document is compared with all others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from multihop.data_prep.duplicates.minhash import similarity
from multihop.data_prep.duplicates.signature_files import RUN_DOCUMENTS, Signatures, column_of
from multihop.data_prep.stages.outputs import Output, write_batches, write_once

RANGE_DOCUMENTS = 2**23
"""Documents whose hashes of a band `candidate_pairs` sorts at once: about 60 bytes each, 500 MB in total."""
ALL_PAIRS_DOCUMENTS = 64
"""Documents of a larger group with one hash are compared with leaders only: a million copies cost a million
comparisons per leader, not half of a million squared."""
MAX_LEADERS = 64
"""A document similar to none of so many leaders has no pair in this band; it may have one in other bands."""
_TOGETHER = 2**20
"""Least documents times bands of a task: below, starting the task and its files cost more."""
_CHUNK = 2**17
"""Signatures in memory at once."""


@dataclass(frozen=True)
class CandidatePairs:
    """Compare documents that agree in one of `bands`, in one of `ranges` equal ranges of hashes: FOLDER/KEY.npy."""

    key: str
    folder: str
    signed: list[str]
    """Paths of all signed splits, in the order of the splits."""
    bands: tuple[int, ...]
    range: int
    ranges: int
    threshold: float


@dataclass(frozen=True)
class FindClusters:
    """Cluster by the pairs of all bands and ranges, in any order: FOLDER/KEY.arrow."""

    key: str
    folder: str
    signed: list[str]
    pairs: list[str]


CLUSTERS = pa.schema(
    [
        pa.field("split", pa.uint32(), nullable=False),
        pa.field("row", pa.uint32(), nullable=False),
        pa.field("document", pa.uint64(), nullable=False),
        pa.field("kept_split", pa.uint32(), nullable=False),
        pa.field("kept_row", pa.uint32(), nullable=False),
        pa.field("kept_document", pa.uint64(), nullable=False),
        pa.field("similarity", pa.float32(), nullable=False),
    ]
)
"""A row per dropped document, sorted by split and row: its position in the read splits, the document that is kept
instead, and the estimated Jaccard similarity of the two."""


def plan_comparisons(documents: int, bands: int) -> list[tuple[tuple[int, ...], int, int]]:
    """Divide the work on signed documents into tasks: (bands, range, ranges) of each `CandidatePairs`.

    A task compares few documents in all bands, many in one band, and very many in one range of a band.
    """
    ranges = max(1, -(-documents // RANGE_DOCUMENTS))
    together = max(1, _TOGETHER // max(documents, 1))
    groups = [tuple(range(bands))[first : first + together] for first in range(0, bands, together)]
    return [(group, part, ranges) for group in groups for part in range(ranges)]


def candidate_pairs(item: CandidatePairs) -> Output:
    """Find pairs of documents that agree in a band and have similar signatures.

    The output is uint64 (pairs, 2), each document as split << 32 | index among the split's signed documents. Connected
    documents are paired with one of them (a star). Metadata: "candidates", documents that agree with another, and
    "pairs".
    """
    folder = Path(item.folder)

    def write(path: Path) -> dict[str, Any]:
        signed = Signatures(item.signed)
        candidates, stars = 0, [np.empty((0, 2), np.uint64)]
        for band in item.bands:
            hashes, codes = _select_groups(signed, *_hashes_in_range(signed, band, item))
            candidates += len(codes)
            for group in _groups(hashes):
                stars += _stars(signed, hashes[group], codes[group], item.threshold)
        pairs = np.concatenate(stars)
        with open(path, "wb") as file:
            np.save(file, pairs[np.lexsort(pairs.T)], allow_pickle=False)
        return {"candidates": candidates, "pairs": len(pairs)}

    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.npy", write)


def find_clusters(item: FindClusters) -> Output:
    """Make each connected component of the pairs a cluster, of which the longest document is kept.

    Of several longest ones the one with the smallest id: that depends on the documents' content only, not on the order
    of splits or workers. The output has the schema CLUSTERS. Memory: about 100 bytes for each document in a pair.
    Metadata: "clusters", "dropped", "dropped_bytes", "largest" (documents of the largest cluster).
    """
    folder = Path(item.folder)

    def write(path: Path) -> dict[str, Any]:
        signed = Signatures(item.signed)
        codes, roots = _components(np.load(pairs, mmap_mode="r", allow_pickle=False) for pairs in item.pairs)
        order = np.lexsort((*_preference(signed, codes), roots))
        first = np.flatnonzero(np.diff(roots[order], prepend=np.uint64(2**64 - 1)))
        sizes = np.diff(first, append=len(codes))
        kept = np.empty_like(codes)
        kept[order] = np.repeat(codes[order[first]], sizes)
        dropped, kept = codes[codes != kept], kept[codes != kept]
        write_batches(path, CLUSTERS, _cluster_batches(signed, dropped, kept), None)
        return {
            "clusters": len(first),
            "dropped": len(dropped),
            "dropped_bytes": int(signed.take(dropped, "bytes").sum(dtype=np.int64)),
            "largest": int(sizes.max(initial=0)),
        }

    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def dropped_rows(clusters: str, splits: int) -> list[np.ndarray]:
    """Read the rows to drop of each split, int64 ascending, from the output of `find_clusters`."""
    with pa.memory_map(clusters) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
        split, row = (table.column(name).to_numpy() for name in ("split", "row"))
        bounds = np.searchsorted(split, np.arange(splits + 1))
        return [row[start:stop].astype(np.int64) for start, stop in pairwise(bounds.tolist())]


def _hashes_in_range(signed: Signatures, band: int, item: CandidatePairs) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the range and their documents, of all runs of all splits."""
    low, high = (2**64 * bound // item.ranges for bound in (item.range, item.range + 1))
    hashes, codes = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for split, runs in enumerate(signed.runs):
        for number, run in enumerate(runs):
            sorted_hashes = column_of(run, f"hash {band}")
            start = np.searchsorted(sorted_hashes, np.uint64(low))
            stop = np.searchsorted(sorted_hashes, np.uint64(high)) if high < 2**64 else len(sorted_hashes)
            indices = column_of(run, f"place {band}")[start:stop]
            hashes.append(sorted_hashes[start:stop])
            codes.append(indices + np.uint64((split << 32) + number * RUN_DOCUMENTS))
    return np.concatenate(hashes), np.concatenate(codes)


def _select_groups(signed: Signatures, hashes: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Select hashes that occur more than once, with their documents, group by group; in a group by preference."""
    order = np.argsort(hashes, kind="stable")  # merges the sorted runs, in half the time or less
    hashes, codes = hashes[order], codes[order]
    equal = hashes[1:] == hashes[:-1]
    grouped = np.zeros(len(hashes), dtype=bool)
    grouped[1:] |= equal
    grouped[:-1] |= equal
    hashes, codes = hashes[grouped], codes[grouped]
    order = np.lexsort((*_preference(signed, codes), hashes))
    return hashes[order], codes[order]


def _preference(signed: Signatures, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return keys for `lexsort`, the last one first: long documents before short ones, then small ids."""
    return codes, signed.take(codes, "document"), -signed.take(codes, "bytes").astype(np.int64)


def _groups(hashes: np.ndarray) -> Iterator[slice]:
    """Yield slices of whole groups of equal hashes, of about _CHUNK documents or of one larger group."""
    ends = np.append(np.flatnonzero(np.diff(hashes)) + 1, len(hashes))
    start = 0
    while start < len(hashes):
        within = np.searchsorted(ends, start + _CHUNK, side="right")
        group = np.searchsorted(ends, start, side="right")
        stop = int(ends[max(within - 1, group)])
        yield slice(start, stop)
        start = stop


def _stars(signed: Signatures, hashes: np.ndarray, codes: np.ndarray, threshold: float) -> list[np.ndarray]:
    """Find pairs (n, 2) that connect similar documents in groups of equal hashes, each in the order of preference."""
    starts = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]))
    sizes = np.diff(starts, append=len(hashes))
    large = sizes > ALL_PAIRS_DOCUMENTS
    stars = []
    for start, size in zip(starts[large].tolist(), sizes[large].tolist(), strict=True):
        stars += _compare_with_leaders(signed, codes[start : start + size], threshold)
    small = ~np.repeat(large, sizes)
    hashes, codes = hashes[small], codes[small]
    if len(codes):
        values = signed.take(codes, "signature")
        joined = [np.empty((0, 2), np.int64)]
        for distance in range(1, ALL_PAIRS_DOCUMENTS):
            one = np.flatnonzero(hashes[distance:] == hashes[:-distance])
            if not len(one):
                break
            for part in np.array_split(one, -(-len(one) // _CHUNK)):
                part = part[similarity(values[part], values[part + distance]) >= threshold]
                joined.append(np.stack([part + distance, part], axis=1))
        stars.append(codes[_star(np.concatenate(joined), len(codes))])
    return stars


def _compare_with_leaders(signed: Signatures, codes: np.ndarray, threshold: float) -> list[np.ndarray]:
    """Cluster by leaders (Hartigan 1975, chapter 3): each document joins the first leader that it is similar to."""
    stars = []
    leaders: list[tuple[np.uint64, np.ndarray]] = []
    for start in range(0, len(codes), _CHUNK):
        rest = codes[start : start + _CHUNK]
        values = signed.take(rest, "signature")
        number = 0
        while len(rest) and (number < len(leaders) or len(leaders) < MAX_LEADERS):
            if number == len(leaders):
                leaders.append((rest[0], values[0]))
                rest, values = rest[1:], values[1:]
            leader, of_leader = leaders[number]
            alike = similarity(values, np.broadcast_to(of_leader, values.shape)) >= threshold
            stars.append(np.stack([rest[alike], np.full(alike.sum(), leader)], axis=1))
            rest, values = rest[~alike], values[~alike]
            number += 1
    return stars


def _star(pairs: np.ndarray, nodes: int) -> np.ndarray:
    """Reduce `pairs`, int64 (n, 2) below `nodes`, to the pairs of each node and the smallest of its component."""
    root = np.arange(nodes)
    while len(pairs):
        ends = root[pairs]
        pairs, ends = pairs[ends[:, 0] != ends[:, 1]], ends[ends[:, 0] != ends[:, 1]]
        np.minimum.at(
            root, ends.max(axis=1), ends.min(axis=1)
        )  # attach each root to its smallest neighbor, then flatten
        while (root[root] != root).any():
            root = root[root]
    members = np.flatnonzero(root != np.arange(nodes))
    return np.stack([members, root[members]], axis=1)


def _components(all_pairs: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return every document in a pair, ascending, and the representative of its component."""
    forest = np.empty((0, 2), np.uint64)
    waiting: list[np.ndarray] = []

    def join_waiting() -> np.ndarray:
        nodes, indices = np.unique(np.concatenate([forest, *waiting]), return_inverse=True)
        return nodes[_star(indices.reshape(-1, 2), len(nodes))]

    for pairs in all_pairs:
        waiting.append(pairs)
        if sum(map(len, waiting)) > len(forest) + 2**20:  # often enough for the memory, seldom enough for the time
            forest, waiting = join_waiting(), []
    forest = join_waiting()
    roots = np.unique(forest[:, 1])
    codes, of = np.concatenate([forest[:, 0], roots]), np.concatenate([forest[:, 1], roots])
    order = np.argsort(codes)
    return codes[order], of[order]


def _cluster_batches(signed: Signatures, dropped: np.ndarray, kept: np.ndarray) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(dropped), _CHUNK):
        pair = dropped[start : start + _CHUNK], kept[start : start + _CHUNK]
        columns: list[np.ndarray] = []
        for codes in pair:
            columns += [(codes >> np.uint64(32)).astype(np.uint32), signed.take(codes, "row")]
            columns.append(signed.take(codes, "document"))
        alike = similarity(*(signed.take(codes, "signature") for codes in pair)).astype(np.float32)
        yield pa.RecordBatch.from_arrays([pa.array(column) for column in (*columns, alike)], schema=CLUSTERS)
