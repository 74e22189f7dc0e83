"""Finds repeated n-grams of words in a text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

SORT_FROM = 1_000
"""Number of words from which pairs are found by sorting integers, which is twice as fast in long texts."""


class RepeatedNgrams:
    """Finds the n-grams that occur more than once among `words`.

    An (n + 1)-gram repeats only where the n-grams at its start and one word later do, so each n only checks what the
    previous one left, which in most texts is little. Words are compared, not hashes: the shares are exact. Query n in
    ascending order. Memory: at most about 400 bytes per word.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._characters = max(sum(map(len, words)), 1)
        self._n, self._firsts = 2, _find_repeated_bigrams(words)
        self._known = (0, 1.0)

    def top_share(self, n: int) -> float:
        """Return the share of the words' characters in the most frequent n-gram.

        Of equally frequent ones, the longest counts; 0 if none occurs twice. As in the paper, overlapping occurrences
        all count, so it may exceed 1.
        """
        if not (firsts := self._level(n)):
            return 0.0
        times = Counter(firsts.values())
        most = max(times.values())
        longest = max(self._length(first, first + n) for first, number in times.items() if number == most)
        return most * longest / self._characters

    def duplicate_share(self, n: int) -> float:
        """Return the share of the words' characters in n-grams that occurred before, each character counted once."""
        covered = end = 0
        for start, first in self._level(n).items():
            if first != start:
                covered += self._length(max(start, end), start + n)
                end = start + n
        return covered / self._characters

    def duplicate_share_exceeds(self, n: int, limit: float) -> bool:
        """Return whether `duplicate_share(n)` exceeds `limit`.

        Words in repeated n-grams are in repeated (n - 1)-grams: the share for a smaller n is an upper bound, and for
        most texts that for the smallest n decides all others.
        """
        smaller, share = self._known
        if smaller <= n and share <= limit:
            return False
        share = self.duplicate_share(n)
        self._known = (n, share)
        return share > limit

    def _level(self, n: int) -> dict[int, int]:
        """Find the starts of repeated n-grams, ascending, each with the start of its first occurrence."""
        if n < self._n:
            self._n, self._firsts = 2, _find_repeated_bigrams(self._words)
        while self._n < n:
            firsts = self._firsts
            starts = [start for start in firsts if start + 1 in firsts]
            self._firsts = _find_repeated(starts, [(firsts[start], firsts[start + 1]) for start in starts])
            self._n += 1
        return self._firsts

    def _length(self, start: int, stop: int) -> int:
        return sum(map(len, self._words[start:stop]))


def _find_repeated_bigrams(words: list[str]) -> dict[int, int]:
    if len(words) < SORT_FROM:
        return _find_repeated(range(max(len(words) - 1, 0)), zip(words, islice(words, 1, None), strict=False))
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


def _find_repeated(starts: Sequence[int], keys: Iterable[tuple[Any, Any]]) -> dict[int, int]:
    """Return those of `starts` (ascending) whose key occurs more than once, each with the first start of its key."""
    first_of: dict[tuple[Any, Any], int] = {}
    firsts = list(map(first_of.setdefault, keys, starts))
    if len(first_of) == len(firsts):
        return {}
    several = {first for start, first in zip(starts, firsts, strict=True) if first != start}
    return {start: first for start, first in zip(starts, firsts, strict=True) if first in several}
