"""Batches of pairs by tokens: which pairs are the i-th batch of an epoch, with `phases[].global_batch_tokens`.

The pairs of an index are sorted by their longer side and cut into classes of similar length, and each class into
batches of equal numbers of pairs, so that a side of a batch has at most `global_batch_tokens` tokens. The number of
batches is therefore the same in every epoch, and so any batch of any epoch can be computed by itself: an epoch permutes
the pairs within each class, which decides what a batch consists of, and the law of order permutes the batches.
"""

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of, permute

Int64 = NDArray[np.int64]
_SIMILAR = 8
"""The longest pair of a class is longer than the shortest by an eighth at most, where a class has pairs for a batch."""


class TokenBatches:
    """The batches that an index of pairs is cut into. Batches and pairs are numbered from 0."""

    def __init__(self, longest: Int64, global_batch_tokens: int) -> None:
        """Cut pairs into batches.

        Args:
            longest: int64 (pairs,), ascending: tokens of each pair's longer side.
            global_batch_tokens: the most tokens of a side of a batch; at least the longest of all.
        """
        assert len(longest) and global_batch_tokens >= longest[-1], global_batch_tokens
        self._pairs = np.array([0, *_class_ends(longest, global_batch_tokens)], np.int64)
        """The first pair of each class; the last one is the number of pairs."""
        self.longest = longest[self._pairs[1:] - 1]
        """int64 (classes,): tokens of the longest side of each class."""
        most = global_batch_tokens // self.longest
        self._batches = np.concatenate([[0], np.cumsum(-(-np.diff(self._pairs) // most))])
        """The first batch of each class; the last one is the number of batches."""

    def __len__(self) -> int:
        return int(self._batches[-1])

    def pairs(self, batch: int, *key: int | str) -> Int64:
        """int64 (B,): the pairs of a batch, as positions in the index, in the epoch of `key`."""
        first, start, stop, size = (int(part[0]) for part in self._bounds(np.array([batch])))
        return first + permute(np.arange(start, stop, dtype=np.uint64), size, key_of(*key, first)).astype(np.int64)

    def sizes(self, batches: Int64) -> Int64:
        """int64, as `batches`: the number of pairs of each."""
        _, start, stop, _ = self._bounds(batches)
        return stop - start

    def _bounds(self, batches: Int64) -> tuple[Int64, Int64, Int64, Int64]:
        """For each batch: its class's first pair, its bounds within the class, and the class's number of pairs."""
        of_class = np.searchsorted(self._batches, batches, side="right") - 1
        number, parts = batches - self._batches[of_class], np.diff(self._batches)[of_class]
        size = np.diff(self._pairs)[of_class]
        return self._pairs[of_class], size * number // parts, size * (number + 1) // parts, size


def _class_ends(longest: Int64, global_batch_tokens: int) -> list[int]:
    """The end of each class of similar lengths. A class has at least the pairs of a batch, if there are as many."""
    ends: list[int] = []
    at = 0
    while at < len(longest):
        similar = longest[at] + longest[at] // _SIMILAR
        stop = int(np.searchsorted(longest, similar, side="right"))
        while stop < len(longest) and stop - at < global_batch_tokens // longest[stop - 1]:
            stop = int(np.searchsorted(longest, longest[stop], side="right"))
        if stop - at < global_batch_tokens // longest[stop - 1] and ends:
            ends.pop()  # too few are left: they join the class before
        ends.append(stop)
        at = stop
    return ends
