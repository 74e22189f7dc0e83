"""Runs of words that a text repeats."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

SORT_FROM = 1_000
"""Words from which on pairs are found by sorting numbers: twice as fast in long texts, and slower in short ones."""


class RepeatedNgrams:
    """The runs of n words that occur more than once among `words`.

    A run of n + 1 words repeats only where a run of n does at its start and one a word further: each n looks only at
    what is left of the one before, which in most texts is little. Nothing is hashed to a number: the shares are exact.
    Ask for one n after the other, from small to large. Memory: at most about 400 bytes a word.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._characters = max(sum(map(len, words)), 1)
        self._n, self._firsts = 2, _repeated_pairs(words)
        self._known = (0, 1.0)

    def top(self, n: int) -> float:
        """The share of the words' characters in the most frequent run of n words; of several, in the longest.

        0 where none occurs twice. As in the paper, runs that overlap are all counted: it may exceed 1.
        """
        if not (firsts := self._level(n)):
            return 0.0
        times = Counter(firsts.values())
        most = max(times.values())
        longest = max(self._length(first, first + n) for first, number in times.items() if number == most)
        return most * longest / self._characters

    def duplicated(self, n: int) -> float:
        """The share of the words' characters in runs of n words that stood before, each character counted once."""
        covered = end = 0
        for start, first in self._level(n).items():
            if first != start:
                covered += self._length(max(start, end), start + n)
                end = start + n
        return covered / self._characters

    def duplicated_beyond(self, n: int, limit: float) -> bool:
        """Whether `duplicated(n)` is more than `limit`.

        The words in runs of n that stood before are in runs of n - 1 that stood before: a share that was found for a
        smaller n is an upper bound, and for most texts that of the smallest n settles all others.
        """
        smaller, share = self._known
        if smaller <= n and share <= limit:
            return False
        share = self.duplicated(n)
        self._known = (n, share)
        return share > limit

    def _level(self, n: int) -> dict[int, int]:
        """Where runs of n words start that occur more than once, ascending, and where the first of the kind does."""
        if n < self._n:
            self._n, self._firsts = 2, _repeated_pairs(self._words)
        while self._n < n:
            firsts = self._firsts
            starts = [start for start in firsts if start + 1 in firsts]
            self._firsts = _repeated(starts, [(firsts[start], firsts[start + 1]) for start in starts])
            self._n += 1
        return self._firsts

    def _length(self, start: int, stop: int) -> int:
        return sum(map(len, self._words[start:stop]))


def _repeated_pairs(words: list[str]) -> dict[int, int]:
    if len(words) < SORT_FROM:
        return _repeated(range(max(len(words) - 1, 0)), zip(words, islice(words, 1, None), strict=False))
    count = len(words)
    first_seen: dict[str, int] = {}
    ids = np.fromiter(map(first_seen.setdefault, words, range(count)), np.int64, count)
    keys = ids[:-1] * count + ids[1:]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    new = np.ones(count, dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=new[1:-1])
    first_of = np.empty_like(order)
    first_of[order] = order[np.maximum.accumulate(np.where(new[:-1], np.arange(count - 1), 0))]
    starts = np.sort(order[~(new[:-1] & new[1:])])
    return dict(zip(starts.tolist(), first_of[starts].tolist(), strict=True))


def _repeated(starts: Sequence[int], keys: Iterable[tuple[Any, Any]]) -> dict[int, int]:
    """Those of `starts` (ascending) whose key is also another's, each with the first of its key."""
    first_of: dict[tuple[Any, Any], int] = {}
    firsts = list(map(first_of.setdefault, keys, starts))
    if len(first_of) == len(firsts):
        return {}
    several = {first for start, first in zip(starts, firsts, strict=True) if first != start}
    return {start: first for start, first in zip(starts, firsts, strict=True) if first in several}
