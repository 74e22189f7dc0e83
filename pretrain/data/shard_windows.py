"""Shuffling by windows of shards: an epoch reads `data.shuffle_window_shards` shards at a time.

An epoch permutes the shards and cuts their order into windows of that many shards. The samples that begin in the shards
of a window are permuted among themselves, and windows follow each other: each sample is used once an epoch, in an
order that is a pure function as without windows, and a step needs the shards of one window, or of two.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of, permute
from multihop.pretrain.data.index import SampleIndex
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.objective import objective_of

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ShardWindows:
    """The windows that each epoch of an index is cut into."""

    first_samples: Int64
    """int64 (shards + 1,), ascending: the first sample that begins in each shard or a later one; the last is the number
    of samples."""
    window_shards: int
    """Shards in a window."""

    def samples(self, positions: Int64, *key: int | str) -> Int64:
        """int64, as `positions`: the samples at positions of the epoch of `key`. O(shards) time and memory."""
        order, starts, bounds = self._epoch(*key)
        windows = np.searchsorted(bounds, positions, side="right") - 1
        shuffled = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            in_window, first, size = windows == window, bounds[window], int(bounds[window + 1] - bounds[window])
            within = (positions[in_window] - first).astype(np.uint64)
            shuffled[in_window] = first + permute(within, size, key_of(*key, "window", window)).astype(np.int64)
        turns = np.searchsorted(starts, shuffled, side="right") - 1
        return self.first_samples[order[turns]] + shuffled - starts[turns]

    def shards(self, positions: Int64, *key: int | str) -> tuple[set[int], int]:
        """The shards of the windows that positions of the epoch of `key` are in, and where the last window ends."""
        order, _, bounds = self._epoch(*key)
        windows = np.unique(np.searchsorted(bounds, positions, side="right") - 1).tolist()
        shards = {
            shard for each in windows for shard in order[each * self.window_shards :][: self.window_shards].tolist()
        }
        return shards, int(bounds[windows[-1] + 1])

    def _epoch(self, *key: int | str) -> tuple[Int64, Int64, Int64]:
        """The shards in their order, the first position of each one's samples before they are shuffled, and the bounds
        of the windows in positions."""
        shards = len(self.first_samples) - 1
        order = permute(np.arange(shards, dtype=np.uint64), shards, key_of(*key, "shards")).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(np.diff(self.first_samples)[order])])
        return order, starts[:-1], np.append(starts[: -1 : self.window_shards], starts[-1])


@dataclass(frozen=True)
class IndexShards:
    """The shards of its split that an index lies in."""

    first: int
    """The shard of the index's first document; the shards of `first_samples` are counted from it."""
    first_samples: Int64
    """The same array as in `ShardWindows`."""
    last_read: Int64
    """int64 (shards,): the last shard, counted from `first`, that the samples which begin in each shard read."""

    def read(self, shards: set[int]) -> set[int]:
        """The shards of the split that those samples read which begin in `shards` of the index."""
        return {self.first + each for shard in shards for each in range(shard, int(self.last_read[shard]) + 1)}


def shards_of_index(
    objective: ObjectiveConfig, index: SampleIndex, shard_starts: Sequence[int], seq_len: int
) -> IndexShards:
    """Find where an index lies in shards, by bisection.

    Args:
        index: its samples are in the order of their first documents.
        shard_starts: the first document of each shard of the split; the last is the number of documents.
    """
    rules = objective_of(objective)

    def first_document(sample: int) -> int:
        row = rules.sample_rows(index.rows, np.array([sample]), seq_len)[0]
        return int(row[rules.DOCUMENT_COLUMNS[0]]) + index.first_document

    def shard_of(document: int) -> int:
        return bisect_right(shard_starts, document) - 1

    first, last = shard_of(index.first_document), shard_of(index.stop_document - 1)
    begins = [
        0,
        *(bisect_left(range(index.size), start, key=first_document) for start in shard_starts[first + 1 : last + 1]),
    ]
    stops = [*begins[1:], index.size]
    # A sample ends in the document in which the next one begins, or before it.
    ends = [last if stop == index.size else shard_of(first_document(stop)) for stop in stops]
    return IndexShards(first, np.array([*begins, index.size]), np.array(ends) - first)
