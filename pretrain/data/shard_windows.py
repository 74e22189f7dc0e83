"""Shuffling by windows of shards: an epoch reads `data.shuffle_window_shards` shards at a time.

An epoch permutes the shards and cuts their order into windows of that many shards. The samples that begin in the shards
of a window are permuted among themselves, and windows follow each other: each sample is used once per epoch, the order
is still a pure function, and a step needs the shards of one or two windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of, permute
from multihop.pretrain.data.index import SampleIndex
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.objective import objective_of

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ShardWindows:
    """The windows of each epoch of an index."""

    first_samples: Int64
    """int64 (shards + 1,), ascending: the first sample that begins in each shard or later; the last is the number of
    samples."""
    window_shards: int
    """Number of shards in a window."""

    def samples(self, positions: Int64, *key: int | str) -> Int64:
        """int64, of the shape of `positions`: the samples at these positions of the epoch of `key`. The first call of
        an epoch takes O(shards) time."""
        order, starts, bounds = _epoch(self, *key)
        windows = np.searchsorted(bounds, positions, side="right") - 1
        shuffled = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            in_window, first, size = windows == window, bounds[window], int(bounds[window + 1] - bounds[window])
            within = (positions[in_window] - first).astype(np.uint64)
            shuffled[in_window] = first + permute(within, size, key_of(*key, "window", window)).astype(np.int64)
        ranks = np.searchsorted(starts, shuffled, side="right") - 1  # of their shards in the epoch's order
        return self.first_samples[order[ranks]] + shuffled - starts[ranks]

    def shards(self, positions: Int64, *key: int | str) -> tuple[set[int], int]:
        """The shards of the windows that contain positions of the epoch of `key`, and the end of the last window."""
        order, _, bounds = _epoch(self, *key)
        windows = np.unique(np.searchsorted(bounds, positions, side="right") - 1).tolist()
        shards = {
            shard for each in windows for shard in order[each * self.window_shards :][: self.window_shards].tolist()
        }
        return shards, int(bounds[windows[-1] + 1])


@lru_cache(maxsize=32)  # the current epochs of so many sources
def _epoch(windows: ShardWindows, *key: int | str) -> tuple[Int64, Int64, Int64]:
    """The order of the shards in the epoch of `key`, the position of each one's first sample before the samples are
    shuffled, and the bounds of the windows as positions."""
    shards = len(windows.first_samples) - 1
    order = permute(np.arange(shards, dtype=np.uint64), shards, key_of(*key, "shards")).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(np.diff(windows.first_samples)[order])])
    return order, starts[:-1], np.append(starts[: -1 : windows.window_shards], starts[-1])


@dataclass(frozen=True)
class IndexShards:
    """The shards of a split that contain an index."""

    first: int
    """Number of the shard with the index's first document; the shards of `first_samples` are counted from it."""
    first_samples: Int64
    """See `ShardWindows.first_samples`."""
    last_read: Int64
    """int64 (shards,): the last shard, counted from `first`, that is read by the samples that begin in each shard."""

    def read_by(self, shards: set[int]) -> set[int]:
        """The shards of the split that are read by the samples that begin in `shards`, counted from `first`."""
        return {self.first + each for shard in shards for each in range(shard, int(self.last_read[shard]) + 1)}


def shards_of_index(
    objective: ObjectiveConfig, index: SampleIndex, shard_starts: Sequence[int], seq_len: int
) -> IndexShards:
    """Find the shards of an index, by bisection.

    Args:
        index: an index whose samples are in the order of their first documents.
        shard_starts: the first document of each shard of the split; the last is the number of documents.
    """
    module, starts = objective_of(objective), np.asarray(shard_starts)

    def first_documents(samples: Int64) -> Int64:
        rows = module.sample_rows(index.rows, samples, seq_len)
        documents: Int64 = rows[:, module.DOCUMENT_COLUMNS[0]] + index.first_document
        return documents

    def shards_of(documents: Int64) -> Int64:
        return np.searchsorted(starts, documents, side="right") - 1

    first, last = shards_of(np.array([index.first_document, index.stop_document - 1])).tolist()
    begins = np.concatenate([[0], _first_samples(first_documents, starts[first + 1 : last + 1], index.size)])
    stops = np.append(begins[1:], index.size)
    # A sample ends in the document in which the next one begins, or before it.
    ends, is_inside = np.full(len(stops), last), stops < index.size
    ends[is_inside] = shards_of(first_documents(stops[is_inside]))
    return IndexShards(first, np.append(begins, index.size), ends - first)


def _first_samples(first_documents: Callable[[Int64], Int64], documents: Int64, size: int) -> Int64:
    """int64 (documents,): for each document the first of `size` samples that begins in it or later, or `size`. All are
    bisected at once: a call for each would take most of a minute for 100,000 shards."""
    low, high = np.zeros(len(documents), np.int64), np.full(len(documents), size)
    while (is_open := np.flatnonzero(low < high)).size:
        middle = (low[is_open] + high[is_open]) // 2
        is_before = first_documents(middle) < documents[is_open]
        low[is_open[is_before]] = middle[is_before] + 1
        high[is_open[~is_before]] = middle[~is_before]
    return low
