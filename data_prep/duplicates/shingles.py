"""Hashes of the words and word n-grams of documents, by numpy over bytes: no Python object per word.

A word is a run of letters, marks and digits of any script, in lower case; everything else separates words. In scripts
without spaces between words (Han, kana, Thai, Lao, Myanmar, Khmer) each letter with its marks is a word.
Letters are lower-cased only if that keeps the number of UTF-8 bytes, so that offsets are those of the original text:
this excludes two dozen rare letters, among them İ, ẞ, Ⱥ and the Kelvin sign.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

from multihop.common.machine import raise_mmap_threshold

CHUNK_BYTES = 2**18
"""Text processed at once: enough to amortize a call, with arrays (8 bytes per byte of text) that fit into caches."""
MAX_WORD_BYTES = 256
"""A longer word counts as several, so that no cost grows with a word's length."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_SEPARATOR, _LETTER, _MARK, _IDEOGRAPH = range(4)
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # Han's iteration mark and zero
    (0x303B, 0x303B),  # the same mark in columns
    (0x3040, 0x30FF),  # kana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xA9E0, 0xA9FF),  # Myanmar
    (0xAA60, 0xAA7F),
    (0xF900, 0xFAFF),  # Han
    (0xFF66, 0xFF9F),  # kana
    (0x1AFF0, 0x1B16F),
)
_HAN_PLANES = 0x20000
"""The first code point from which every character counts as Han."""


@dataclass(frozen=True)
class Words:
    """Holds the words of a few whole documents, or of a part of one that is longer than CHUNK_BYTES."""

    hashes: np.ndarray
    """uint64 (words,)."""
    starts: np.ndarray
    """int64 (words,): offset of each word in bytes; see `origins`."""
    stops: np.ndarray
    bounds: np.ndarray
    """int64 (documents + 1,): the words of document i are bounds[i] to bounds[i + 1]."""
    origins: np.ndarray
    """int64 (documents,): subtract it from starts and stops for offsets into the document's UTF-8."""
    first_document: int
    """Index of the first of these documents among all."""
    whole: bool
    """False if other parts hold words of the document too."""


@dataclass(frozen=True)
class Ngrams:
    """Holds the n-grams of `Words`: words first[i] to last[i] (exclusive) of documents[i]."""

    hashes: np.ndarray
    """uint64 (n-grams,)."""
    documents: np.ndarray
    """int64 (n-grams,): index into the documents of these `Words`."""
    first: np.ndarray
    """int64 (n-grams,)."""
    last: np.ndarray


def read_words(texts: pa.StringArray, carried: int) -> Iterator[Words]:
    """Yield the words of each text, in order.

    Documents longer than CHUNK_BYTES come in parts, each of which begins with the last `carried` words of the previous
    part: with n - 1 of them every n-gram is whole in a part. Memory besides the texts: about 50 bytes per byte of a
    chunk, 13 MB.
    """
    assert texts.type == pa.string(), texts.type
    raise_mmap_threshold()
    _, offsets, data = texts.buffers()
    if not len(texts):
        return
    edges = np.frombuffer(offsets, "<i4")[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    buffer = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    start = 0
    while start < len(texts):
        stop = int(np.searchsorted(edges, edges[start] + CHUNK_BYTES, side="right")) - 1
        if stop > start:
            inner = edges[start : stop + 1] - edges[start]
            hashes, starts, stops = _words(buffer[edges[start] : edges[stop]], inner)
            yield Words(hashes, starts, stops, np.searchsorted(starts, inner), inner[:-1], start, True)
        else:
            stop = start + 1
            yield from _parts(buffer[edges[start] : edges[stop]], start, carried)
        start = stop


def ngrams(words: Words, n: int) -> Ngrams:
    """Return all n-grams of `n` words within a document; for a shorter document with words, one of all its words.

    An n-gram's hash is a random linear function of its words' hashes, mixed by `mix`.
    """
    lengths = np.diff(words.bounds)
    weights = _odd_numbers(n)
    windows = max(0, len(words.hashes) - n + 1)
    within = np.ones(windows, dtype=bool)
    across = (words.bounds[1:-1, None] - np.arange(1, n)).ravel()
    within[across[(across >= 0) & (across < windows)]] = False
    first = np.flatnonzero(within)
    hashes = np.zeros(windows, np.uint64)
    for position, weight in enumerate(weights):
        hashes += words.hashes[position : position + windows] * weight
    hashes = hashes[first] if len(first) < windows else hashes
    documents = np.repeat(np.arange(len(lengths)), np.maximum(lengths - n + 1, 0))
    short = np.flatnonzero((lengths > 0) & (lengths < n)) if words.whole else np.empty(0, np.int64)
    if not len(short):
        return Ngrams(mix(hashes), documents, first, first + n)
    of_short = np.zeros(len(short), np.uint64)
    for position, weight in enumerate(weights[:-1]):
        long_enough = position < lengths[short]
        of_short[long_enough] += words.hashes[words.bounds[short[long_enough]] + position] * weight
    return Ngrams(
        mix(np.concatenate([hashes, of_short])),
        np.concatenate([documents, short]),
        np.concatenate([first, words.bounds[short]]),
        np.concatenate([first + n, words.bounds[short + 1]]),
    )


def mix(hashes: np.ndarray) -> np.ndarray:
    """Apply fmix64, the finalizer of MurmurHash3's 128-bit variant (Appleby 2011), in place: every bit affects all."""
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(33)
    return hashes


def _parts(document: np.ndarray, number: int, carried: int) -> Iterator[Words]:
    before = (np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
    start, whole = 0, True
    while start < len(document):
        stop = min(start + CHUNK_BYTES, len(document))
        while stop < len(document) and document[stop] & 0xC0 == 0x80:
            stop -= 1
        hashes, starts, stops = _words(document[start:stop], np.array([0, stop - start]))
        begin, start = start, stop
        if stop < len(document) and len(stops) and stops[-1] == stop - begin:  # the word may continue in the next part
            start = begin + int(starts[-1])
            hashes, starts, stops = hashes[:-1], starts[:-1], stops[:-1]
        chunk = (hashes, starts + begin, stops + begin)
        hashes, starts, stops = (np.concatenate(pair) for pair in zip(before, chunk, strict=True))
        ends = start == len(document)
        yield Words(hashes, starts, stops, np.array([0, len(hashes)]), np.zeros(1, np.int64), number, whole and ends)
        keep = max(len(hashes) - carried, 0)
        before = (hashes[keep:], starts[keep:], stops[keep:])
        whole = whole and keep == 0


def _words(data: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash the words in `data`, UTF-8 of documents that begin and end at `edges`; returns hashes, starts and stops."""
    lower, starts, stops = _word_boundaries(data, edges)
    lengths = stops - starts
    if len(lengths) and lengths.max() > MAX_WORD_BYTES:
        parts = -(-lengths // MAX_WORD_BYTES)
        within = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = np.repeat(starts, parts) + MAX_WORD_BYTES * within
        stops = np.minimum(starts + MAX_WORD_BYTES, np.repeat(stops, parts))
    # A polynomial of the bytes modulo 2^64: differences of prefix sums, divided by the power at the word's start.
    powers, inverses = _powers(CHUNK_BYTES)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(lower.astype(np.uint64) * powers[: len(data)], out=sums[1:])
    hashes = (sums[stops] - sums[starts]) * inverses[starts]
    hashes ^= hashes >> np.uint64(32)  # makes it nonlinear, since n-grams are sums of these
    hashes *= _ODD
    return hashes, starts, stops


def _word_boundaries(data: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bytes in lower case, and the starts and stops of words."""
    upper = data - np.uint8(ord("A")) < 26
    lower = data + (upper.view(np.uint8) << np.uint8(5))
    inside = np.zeros(len(data) + 2, dtype=bool)  # with a separator before and after
    is_word = inside[1:-1]
    np.less(lower - np.uint8(ord("a")), 26, out=is_word)
    is_word |= lower - np.uint8(ord("0")) < 10
    is_word |= lower >= 0x80
    parted = np.zeros(len(data) + 1, dtype=bool)
    _mark_beyond_ascii(data, lower, is_word, parted)
    parted[edges] = True
    parted |= inside[1:] != inside[:-1]
    return lower, np.flatnonzero(parted & inside[1:]), np.flatnonzero(parted & inside[:-1])


def _mark_beyond_ascii(data: np.ndarray, lower: np.ndarray, is_word: np.ndarray, parted: np.ndarray) -> None:
    leads = np.flatnonzero(data >= 0xC0)
    if not len(leads):
        return
    kinds, lower_case = _characters()
    bytes_of = 2 + (data[leads] >= 0xE0) + (data[leads] >= 0xF0)
    marks = []
    for size in (2, 3, 4):
        at = leads[bytes_of == size]
        code = (data[at] & (0x7F >> size)).astype(np.int64)
        for byte in range(1, size):
            code = code << 6 | data[at + byte] & 0x3F
        code = np.minimum(code, _HAN_PLANES)
        kind = kinds[code]
        for byte in range(size):
            is_word[at[kind == _SEPARATOR] + byte] = False
        alone = at[kind == _IDEOGRAPH]
        parted[alone] = parted[alone + size] = True
        marks.append(at[kind == _MARK])
        at, code = at[lower_case[code] != code], lower_case[code[lower_case[code] != code]]
        for byte in range(size - 1, 0, -1):
            lower[at + byte] = 0x80 | code & 0x3F
            code = code >> 6
        lower[at] = 0xFF << 8 - size & 0xFF | code
    for at in marks:
        parted[at] = False


@cache
def _characters() -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 and int64 (_HAN_PLANES + 1,): kind and lower case of each code point beyond ASCII."""
    kinds = np.full(_HAN_PLANES + 1, _SEPARATOR, np.uint8)
    lower = np.arange(_HAN_PLANES + 1)
    of_category = {"L": _LETTER, "N": _LETTER, "M": _MARK}
    for code in range(0x80, _HAN_PLANES):
        character = chr(code)
        category = unicodedata.category(character)
        kinds[code] = of_category.get(category[0], _SEPARATOR)
        if category in ("Lu", "Lt", "Nl"):  # Nl: Roman numerals
            small = character.lower()
            if len(small) == 1 and len(small.encode()) == len(character.encode()):
                lower[code] = ord(small)
    for start, stop in _WITHOUT_SPACES:
        letters = kinds[start : stop + 1]
        letters[letters == _LETTER] = _IDEOGRAPH
    kinds[_HAN_PLANES] = _IDEOGRAPH
    return kinds, lower


@cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return uint64 (count + 1,) each: the powers of an odd number modulo 2^64, and those of its inverse."""
    base = 0xD1342543DE82EF95
    both = np.ones((2, count + 1), np.uint64)
    for powers, factor in zip(both, (base, pow(base, -1, 2**64)), strict=True):
        powers[1:] = np.uint64(factor)
        np.multiply.accumulate(powers, out=powers)
    return both[0], both[1]


@cache
def _odd_numbers(count: int) -> np.ndarray:
    """Return uint64 (count,): fixed odd multipliers that look random."""
    return mix(np.arange(1, count + 1, dtype=np.uint64) * _ODD) | np.uint64(1)
