"""A cache of the tokens of words.

Half of a text consists of a few hundred words (Zipf 1949), and the tokens of a word do not depend on its context as
long as no token spans words. So each word is encoded when it is first seen, and numpy gathers the tokens of texts.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Lengths = NDArray[np.int64]

# Memory of the cached words, exceeded by one batch at most. Beyond it the cache is emptied.
MAX_BYTES = 64 * 2**20
_BYTES_PER_WORD = 150  # an entry of the dictionary, the word's header, the place of its tokens


class WordTokens:
    """The tokens of words, by the words' numbers from 0."""

    def __init__(self) -> None:
        self._ids: Ids = np.empty(0, np.int32)
        self._starts: Lengths = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def append(self, tokens: Iterable[Sequence[int]]) -> None:
        """Add words with the next numbers, given the tokens of each."""
        ids, lengths = flat(tokens)
        self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(lengths)])
        self._ids = np.concatenate([self._ids, ids])

    def gather(self, words: NDArray[np.int64], bounds: NDArray[np.int64]) -> tuple[Ids, Lengths]:
        """The tokens of texts.

        Args:
            words: int64, the numbers of the texts' words, concatenated.
            bounds: int64 (texts + 1,), where each text begins in `words`, and the end.

        Returns:
            ids: int32 (sum of lengths,), the texts' tokens, concatenated.
            lengths: int64 (texts,), the number of tokens of each text.
        """
        starts = self._starts[words]
        lengths = self._starts[words + 1] - starts
        ends = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])
        return self._ids[at], np.diff(ends[bounds])


class WordCache:
    """The tokens of words of any kind, within MAX_BYTES."""

    def __init__(self, encode: Callable[[list[str]], Iterable[Sequence[int]]]) -> None:
        """`encode` returns the tokens of each of several words."""
        self._encode = encode
        self._forget()

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._tokens = WordTokens()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, texts: list[list[str]]) -> tuple[Ids, Lengths]:
        """The tokens of texts, each given as its words; returns what `WordTokens.gather` does."""
        if self._bytes > MAX_BYTES:
            self._forget()
        bounds = np.cumsum([0, *map(len, texts)])
        words = np.fromiter(map(self._numbers.__getitem__, chain.from_iterable(texts)), np.int64, bounds[-1])
        if new := list(islice(reversed(self._numbers), len(self._numbers) - len(self._tokens)))[::-1]:
            self._tokens.append(self._encode(new))
            self._bytes += sum(map(len, new)) + _BYTES_PER_WORD * len(new)
        return self._tokens.gather(words, bounds)


class _Numbers(dict[str, int]):
    """Numbers words from 0 in the order in which they are first looked up."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


def flat(tokens: Iterable[Sequence[int]]) -> tuple[Ids, Lengths]:
    """Tokens of several texts, concatenated, int32; and the number of tokens of each, int64."""
    tokens = list(tokens)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    return np.fromiter(chain.from_iterable(tokens), np.int32, lengths.sum()), lengths
