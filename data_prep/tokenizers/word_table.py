"""What `word_cache` does, for words that stand between blanks: found, compared and looked up by numpy.

A short word is its own key: its bytes and their number make two integers. Keys stand in a hash table with linear
probing, in which the words of a batch are looked up all at once. Long words, of which there are few, are looked up one
by one.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from data_prep.tokenizers.word_cache import MAX_BYTES, Ids, Lengths, Pieces

UInt64 = NDArray[np.uint64]

_SHORT = 15
"""Bytes of a word that makes a key of 16, one of which tells its length."""
_BYTES_PER_WORD = 128  # its share of a table that is a quarter full at least, and its pieces
_FIRST_SLOTS = 2**16
# What is kept of the first eight bytes of a word of each length, and of the next; the last byte of its key.
_LOW_MASKS = np.array([2 ** (8 * min(n, 8)) - 1 for n in range(_SHORT + 1)], np.uint64)
_HIGH_MASKS = np.array([2 ** (8 * max(n - 8, 0)) - 1 for n in range(_SHORT + 1)], np.uint64)
_TOLD = np.array([(n + 1) << 56 for n in range(_SHORT + 1)], np.uint64)
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93], np.uint64)


class WordTable:
    """Words between blanks and their pieces, as many as fit into MAX_BYTES."""

    def __init__(self, encode: Callable[[list[str]], Iterable[Sequence[int]]], cuts: bytes) -> None:
        """`encode` gives the pieces of each of several words; each byte of `cuts`, of ASCII, stands between words."""
        self._encode = encode
        self._cuts = cuts
        self._forget()

    def _forget(self) -> None:
        self._pieces = Pieces()
        self._long: dict[bytes, int] = {}
        self._bytes = 0
        self._set_slots(_FIRST_SLOTS)

    def _set_slots(self, slots: int) -> None:
        self._used = 0
        # The two halves of the keys. The second is never 0, since it tells the length from 1 on.
        self._low, self._high = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self._numbers = np.zeros(slots, np.int64)

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, texts: list[bytes], whole: Sequence[int] = ()) -> tuple[Ids, Lengths]:
        """The pieces of texts in UTF-8, as `Pieces.gather` returns them; `whole` tells those that are one word each."""
        if self._bytes > MAX_BYTES:
            self._forget()
        joined = b"\n".join([*texts, bytes(16)])  # keys are read past the ends of words
        text_ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64) - 1
        is_cut = np.zeros(len(joined), bool)
        for cut in self._cuts:
            is_cut |= np.frombuffer(joined, np.uint8) == cut
        for text in whole:
            is_cut[text_ends[text] - len(texts[text]) : text_ends[text]] = False
        is_cut[text_ends] = True
        ends = np.flatnonzero(is_cut)
        starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
        words = self._number(joined, starts, ends - starts)
        return self._pieces.gather(words, np.concatenate([[0], np.searchsorted(ends, text_ends) + 1]))

    def _number(self, text: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The words' numbers; those that are new are encoded."""
        words = np.empty(len(starts), np.int64)
        short, long = np.flatnonzero(lengths <= _SHORT), np.flatnonzero(lengths > _SHORT)
        words[short], first = self._look_up(*_keys(text, starts.take(short), lengths.take(short)))
        at = short[first]
        new = [text[start : start + n] for start, n in zip(starts[at].tolist(), lengths[at].tolist(), strict=True)]
        for i, start, n in zip(long.tolist(), starts[long].tolist(), lengths[long].tolist(), strict=True):
            word = text[start : start + n]
            number = self._long.setdefault(word, len(self._pieces) + len(new))
            if number == len(self._pieces) + len(new):
                new.append(word)
                self._bytes += n
            words[i] = number
        if new:
            self._pieces.append(self._encode([word.decode() for word in new]))
            self._bytes += _BYTES_PER_WORD * len(new)
        return words

    def _look_up(self, low: UInt64, high: UInt64) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of keys, of new ones from `len(self)` on; and a place in the keys where each of those stands."""
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
        """Numbers of keys, after the new ones among them were entered with those in `free`; one of each new one."""
        numbers, new = np.empty(len(low), np.int64), np.empty(0, np.int64)
        mixed = (low * _ODD[0]) ^ (high * _ODD[1])
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _ODD[2]
        slots = (mixed >> np.uint64(32)).astype(np.int64) & (len(self._low) - 1)
        left = np.arange(len(low))
        while len(left):
            in_slot = self._high.take(slots)
            if len(empty := np.flatnonzero(in_slot == 0)):
                # Of several keys that want one slot one gets it.
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
    """The bytes of words, at most 15 each, padded with zeros, and in the last byte the length + 1: uint64 (words,)."""
    eights = np.ndarray((len(text) - 7,), "<u8", text, strides=(1,))  # the eight bytes from each place on
    low = eights[starts] & _LOW_MASKS.take(lengths)
    high = eights[starts + 8] & _HIGH_MASKS.take(lengths)
    return low, high | _TOLD.take(lengths)
