"""Caches the tokens of words, which numpy finds, compares and looks up.

Half of a text consists of a few hundred words (Zipf 1949), and the tokens of a word do not depend on its context as
long as no token spans words. So each word is encoded when it is first seen, and numpy gathers the tokens of texts.

A short word is its own key: its bytes and its length make two integers. Keys are in a hash table with linear probing,
in which all words of a batch are looked up at once. Long words, which are rare, are looked up one by one.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Lengths = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

# Memory of the cached words, exceeded by one batch at most. Beyond it the cache is emptied.
MAX_BYTES = 64 * 2**20

_SHORT = 15
"""Longest word, in bytes, with a key: of a key's 16 bytes the last is for the length."""
_BYTES_PER_WORD = 128  # its share of a table that is at least a quarter full, and its tokens
_FIRST_SLOTS = 2**16
# By length: masks of a word's first and second eight bytes, and the last byte of its key.
_LOW_MASKS = np.array([2 ** (8 * min(n, 8)) - 1 for n in range(_SHORT + 1)], np.uint64)
_HIGH_MASKS = np.array([2 ** (8 * max(n - 8, 0)) - 1 for n in range(_SHORT + 1)], np.uint64)
_LENGTH_BYTES = np.array([(n + 1) << 56 for n in range(_SHORT + 1)], np.uint64)
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93], np.uint64)


class WordTokens:
    """Holds the tokens of words, by the words' numbers from 0."""

    def __init__(self) -> None:
        self._ids: Ids = np.empty(0, np.int32)
        self._starts: Lengths = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def append(self, tokens: Iterable[Sequence[int]]) -> None:
        """Add words with the next numbers."""
        ids, lengths = concatenate(tokens)
        self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(lengths)])
        self._ids = np.concatenate([self._ids, ids])

    def gather(self, words: NDArray[np.int64], bounds: NDArray[np.int64]) -> tuple[Ids, Lengths]:
        """Return the tokens of texts.

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


class WordTable:
    """Caches the tokens of words, within MAX_BYTES."""

    def __init__(
        self,
        encode: Callable[[list[str]], Iterable[Sequence[int]]],
        separators: bytes = b"",
        cuts: NDArray[np.bool_] | None = None,
    ) -> None:
        """Create an empty cache. Without separators and cuts a text is one word.

        Args:
            encode: returns the tokens of each of several words.
            separators: ASCII bytes between words.
            cuts: bool (65536,), by two adjacent bytes, first + 256 * second: whether a word ends between them.
        """
        self._encode = encode
        self._separators = separators
        self._cuts = cuts
        self._clear()

    def _clear(self) -> None:
        self._tokens = WordTokens()
        self._long: dict[bytes, int] = {}
        self._bytes = 0
        self._set_slots(_FIRST_SLOTS)

    def _set_slots(self, slots: int) -> None:
        self._used = 0
        # The two halves of the keys. The second is never 0, since it holds the length + 1.
        self._low, self._high = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self._numbers = np.zeros(slots, np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, texts: list[bytes], whole: Sequence[int] = ()) -> tuple[Ids, Lengths]:
        """Encode texts in UTF-8; returns the tokens as `WordTokens.gather`.

        Args:
            whole: indices of texts that are one word each.
        """
        if self._bytes > MAX_BYTES:
            self._clear()
        joined = b"\n".join([*texts, bytes(16)])  # keys are read beyond the ends of words
        text_ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64) - 1
        is_separator = np.zeros(len(joined), bool)
        for separator in self._separators:
            is_separator |= np.frombuffer(joined, np.uint8) == separator
        ends_word = np.zeros(len(joined), bool)
        if self._cuts is not None:
            ends_word[1:] = self._cuts.take(np.ndarray((len(joined) - 1,), "<u2", joined, strides=(1,)))
            ends_word[text_ends + 1] = False
        ends_word |= is_separator
        for text in whole:
            ends_word[text_ends[text] - len(texts[text]) : text_ends[text]] = False
        ends_word[text_ends] = is_separator[text_ends] = True
        ends = np.flatnonzero(ends_word[:-16])
        starts = np.concatenate([[0], ends[:-1] + is_separator[ends[:-1]]])[: len(ends)]
        words = self._number(joined, starts, ends - starts)
        return self._tokens.gather(words, np.concatenate([[0], np.searchsorted(ends, text_ends) + 1]))

    def _number(self, text: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the words' numbers; new words are encoded."""
        try:
            return self._number_and_encode(text, starts, lengths)
        except BaseException:
            self._clear()  # new words have numbers, and may have no tokens
            raise

    def _number_and_encode(
        self, text: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        words = np.empty(len(starts), np.int64)
        short, long = np.flatnonzero(lengths <= _SHORT), np.flatnonzero(lengths > _SHORT)
        words[short], first = self._look_up(*_keys(text, starts.take(short), lengths.take(short)))
        at = short[first]
        new = [text[start : start + n] for start, n in zip(starts[at].tolist(), lengths[at].tolist(), strict=True)]
        for i, start, n in zip(long.tolist(), starts[long].tolist(), lengths[long].tolist(), strict=True):
            word = text[start : start + n]
            number = self._long.setdefault(word, len(self._tokens) + len(new))
            if number == len(self._tokens) + len(new):
                new.append(word)
                self._bytes += n
            words[i] = number
        if new:
            self._tokens.append(self._encode([word.decode() for word in new]))
            self._bytes += _BYTES_PER_WORD * len(new)
        return words

    def _look_up(self, low: UInt64, high: UInt64) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of keys, new ones from `len(self)` on; and for each new key an index into the keys."""
        numbers, first = np.empty(len(low), np.int64), np.empty(0, np.int64)
        start = 0
        while start < len(low):
            if 2 * self._used > len(self._low):
                self._grow()
            part = slice(start, start + len(self._low) // 4)
            free = len(self) + len(first) + np.arange(len(low[part]))
            numbers[part], new = self._probe(low[part], high[part], free)
            first = np.concatenate([first, start + new])
            start = part.stop
        return numbers, first

    def _grow(self) -> None:
        used = self._high != 0
        low, high, numbers = self._low[used], self._high[used], self._numbers[used]
        self._set_slots(2 * len(used))
        _, order = self._probe(low, high, np.arange(len(low)))
        used = self._high != 0
        self._numbers[used] = numbers[order[self._numbers[used]]]

    def _probe(self, low: UInt64, high: UInt64, free: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of keys, after adding the new ones with those in `free`; and an index for each new key."""
        numbers, new = np.empty(len(low), np.int64), np.empty(0, np.int64)
        mixed = (low * _MULTIPLIERS[0]) ^ (high * _MULTIPLIERS[1])
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _MULTIPLIERS[2]
        slots = (mixed >> np.uint64(32)).astype(np.int64) & (len(self._low) - 1)
        left = np.arange(len(low))
        while len(left):
            in_slot = self._high.take(slots)
            if len(empty := np.flatnonzero(in_slot == 0)):
                # Of several keys that want one slot, one gets it.
                self._numbers[slots[empty]] = left[empty]
                taken = np.unique(slots[empty])
                chosen = self._numbers[taken]
                self._low[taken], self._high[taken] = low[chosen], high[chosen]
                self._numbers[taken] = free[len(new) : len(new) + len(taken)]
                new = np.concatenate([new, chosen])
                in_slot = self._high.take(slots)
            same = (in_slot == high.take(left)) & (self._low.take(slots) == low.take(left))
            numbers[left[same]] = self._numbers.take(slots[same])
            left, slots = left[~same], (slots[~same] + 1) & (len(self._low) - 1)
        self._used += len(new)
        return numbers, new


def _keys(text: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[UInt64, UInt64]:
    """Return the keys of words of at most 15 bytes: the bytes, padded with zeros, and the length + 1 in the last byte.

    Returns two uint64 (words,), the halves of the keys.
    """
    eights = np.ndarray((len(text) - 7,), "<u8", text, strides=(1,))  # the eight bytes from each offset on
    low = eights[starts] & _LOW_MASKS.take(lengths)
    high = eights[starts + 8] & _HIGH_MASKS.take(lengths)
    return low, high | _LENGTH_BYTES.take(lengths)


def concatenate(tokens: Iterable[Sequence[int]]) -> tuple[Ids, Lengths]:
    """Concatenate the tokens of several texts, int32; also returns the number of tokens of each, int64."""
    tokens = list(tokens)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    return np.fromiter(chain.from_iterable(tokens), np.int32, lengths.sum()), lengths
