"""Batches of pairs by tokens: which pairs are in the i-th batch of an epoch, with `phases[].global_batch_tokens`.

The pairs of an index are sorted by their longer side and cut into buckets of similar length, and each bucket into
batches of equal numbers of pairs, so that a side of a batch has at most `global_batch_tokens` tokens. The number of
batches is therefore the same in every epoch, and any batch of any epoch can be computed alone: an epoch permutes the
pairs within each bucket, which decides the pairs of a batch, and `multihop.pretrain.data.order` permutes the batches.
"""

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of, permute

Int64 = NDArray[np.int64]
_TOLERANCE_DIVISOR = 8
"""The longest pair of a bucket is at most an eighth longer than the shortest, if that is enough for a batch."""


class TokenBatches:
    """The batches of an index of pairs. Batches and pairs are numbered from 0."""

    def __init__(self, longest: Int64, global_batch_tokens: int) -> None:
        """Divide pairs into batches.

        Args:
            longest: int64 (pairs,), ascending: tokens of each pair's longer side.
            global_batch_tokens: maximum tokens of either side of a batch; at least the largest of `longest`.
        """
        assert len(longest) and global_batch_tokens >= longest[-1], global_batch_tokens
        self._pairs = np.array([0, *_bucket_ends(longest, global_batch_tokens)], np.int64)
        """The first pair of each bucket; the last is the number of pairs."""
        self.longest = longest[self._pairs[1:] - 1]
        """int64 (buckets,): tokens of the longest side in each bucket."""
        most_pairs = global_batch_tokens // self.longest
        self._batches = np.concatenate([[0], np.cumsum(-(-np.diff(self._pairs) // most_pairs))])
        """The first batch of each bucket; the last is the number of batches."""

    def __len__(self) -> int:
        return int(self._batches[-1])

    def pairs(self, batch: int, *key: int | str) -> Int64:
        """int64 (B,): the pairs of a batch in the epoch of `key`, as positions in the index."""
        first, start, stop, size = (int(part[0]) for part in self._bounds(np.array([batch])))
        return first + permute(np.arange(start, stop, dtype=np.uint64), size, key_of(*key, first)).astype(np.int64)

    def sizes(self, batches: Int64) -> Int64:
        """int64, of the shape of `batches`: the number of pairs in each."""
        _, start, stop, _ = self._bounds(batches)
        return stop - start

    def _bounds(self, batches: Int64) -> tuple[Int64, Int64, Int64, Int64]:
        """For each batch: its bucket's first pair, its bounds within the bucket, and the bucket's number of pairs."""
        buckets = np.searchsorted(self._batches, batches, side="right") - 1
        number, parts = batches - self._batches[buckets], np.diff(self._batches)[buckets]
        size = np.diff(self._pairs)[buckets]
        return self._pairs[buckets], size * number // parts, size * (number + 1) // parts, size


def _bucket_ends(longest: Int64, global_batch_tokens: int) -> list[int]:
    """The end of each bucket of similar lengths. A bucket has at least the pairs of a batch, if there are as many."""
    ends: list[int] = []
    at = 0
    while at < len(longest):
        similar = longest[at] + longest[at] // _TOLERANCE_DIVISOR
        stop = int(np.searchsorted(longest, similar, side="right"))
        while stop < len(longest) and stop - at < global_batch_tokens // longest[stop - 1]:
            stop = int(np.searchsorted(longest, longest[stop], side="right"))
        if stop - at < global_batch_tokens // longest[stop - 1] and ends:
            ends.pop()  # too few are left: they join the previous bucket
        ends.append(stop)
        at = stop
    return ends
