"""Pieces of words, encoded once: what makes a tokenizer as fast as text repeats itself.

Half of a text is made of a few hundred words (Zipf 1949), and the pieces of a word do not depend on where it stands as
long as no piece reaches over the word's edges. So each word is encoded when it is first seen, and a text's pieces are
gathered from there by numpy.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Lengths = NDArray[np.int64]

# Memory of the words that are kept; of one batch more for a moment. Beyond it they are forgotten, and learned anew.
MAX_BYTES = 64 * 2**20
_BYTES_PER_WORD = 150  # an entry of the dictionary, the word's header, where its pieces are


class Pieces:
    """The pieces of words that are numbered from 0."""

    def __init__(self) -> None:
        self._ids: Ids = np.empty(0, np.int32)
        self._starts: Lengths = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def append(self, pieces: Iterable[Sequence[int]]) -> None:
        """Words with the next numbers, the pieces of each."""
        ids, lengths = flat(pieces)
        self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(lengths)])
        self._ids = np.concatenate([self._ids, ids])

    def gather(self, words: NDArray[np.int64], bounds: NDArray[np.int64]) -> tuple[Ids, Lengths]:
        """Pieces of texts.

        Args:
            words: the texts' words one behind the other.
            bounds: int64 (texts + 1,), where each text begins in `words`, and its end.

        Returns:
            ids: int32 (sum of lengths,), the texts' pieces one behind the other.
            lengths: int64 (texts,), pieces of each.
        """
        starts = self._starts[words]
        lengths = self._starts[words + 1] - starts
        ends = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])
        return self._ids[at], np.diff(ends[bounds])


class WordCache:
    """Words of any make and their pieces, as many as fit into MAX_BYTES."""

    def __init__(self, encode: Callable[[list[str]], Iterable[Sequence[int]]]) -> None:
        """`encode` gives the pieces of each of several words."""
        self._encode = encode
        self._forget()

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._pieces = Pieces()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, texts: list[list[str]]) -> tuple[Ids, Lengths]:
        """The pieces of texts of which the words are given, as `Pieces.gather` returns them."""
        if self._bytes > MAX_BYTES:
            self._forget()
        bounds = np.cumsum([0, *map(len, texts)])
        words = np.fromiter(map(self._numbers.__getitem__, chain.from_iterable(texts)), np.int64, bounds[-1])
        if new := list(islice(reversed(self._numbers), len(self._numbers) - len(self._pieces)))[::-1]:
            self._pieces.append(self._encode(new))
            self._bytes += sum(map(len, new)) + _BYTES_PER_WORD * len(new)
        return self._pieces.gather(words, bounds)


class _Numbers(dict[str, int]):
    """Numbers words from 0 in the order in which they are asked for."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


def flat(pieces: Iterable[Sequence[int]]) -> tuple[Ids, Lengths]:
    """Pieces of several texts one behind the other, int32, and how many each has, int64."""
    pieces = list(pieces)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    return np.fromiter(chain.from_iterable(pieces), np.int32, lengths.sum()), lengths
