"""Signatures whose agreement estimates the Jaccard similarity of two documents' shingles.

MinHash (Broder 1997, "On the resemblance and containment of documents") estimates the Jaccard similarity of two sets
by the share of k hash functions with the same smallest value on both. Here the k values are computed as in "Fast
Similarity Sketching" (Dahlgaard, Knudsen and Thorup, FOCS 2017): each round throws every element into one of k bins,
and a bin keeps the smallest (round, value). Each bin agrees with probability J, as in MinHash, and the estimate is as
concentrated; but while MinHash hashes each of n elements k times, about n + k ln k throws are enough.
"""

import math
from collections.abc import Iterable
from functools import cache

import numpy as np
import pyarrow as pa

from multihop.data_prep.duplicates.shingles import Words, mix, ngrams, read_words

RECALL = 0.98
"""Required probability that a pair at the threshold is a candidate."""

_EMPTY = np.uint64(2**64 - 1)
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_WORTH_COPYING = 0.5
"""Elements are dropped from further rounds when at most this share of the documents still needs them."""
_FEW_ROUNDS = 8
"""Number of rounds per chunk; further ones, which short documents need, are done for many documents at once."""


def signatures(texts: pa.StringArray, shingle_words: int, permutations: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the signatures of documents.

    A document's shingles are the set of its n-grams of `shingle_words` words (see shingles.py); its signature depends
    on that set only. Memory: 20 MB, plus 20 bytes per permutation and document.

    Returns:
        uint32 (documents, permutations), the signatures.
        bool (documents,): false for documents without a word, whose signature is meaningless.
    """
    return signatures_of_words(read_words(texts, shingle_words - 1), len(texts), shingle_words, permutations)


def signatures_of_words(
    parts: Iterable[Words], documents: int, shingle_words: int, permutations: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute `signatures` from the documents' words; each part carries over `shingle_words - 1` words."""
    sketch = np.full((documents, permutations), _EMPTY)
    later: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0, np.uint64), np.empty(0, np.int64))]
    for words in parts:
        grams = ngrams(words, shingle_words)
        later.append(_throw(sketch, grams.hashes, grams.documents + words.first_document, range(_FEW_ROUNDS)))
    hashes, of_documents = (np.concatenate(each) for each in zip(*later, strict=True))
    _throw(sketch, hashes, of_documents, range(_FEW_ROUNDS, 2 * permutations))
    return (sketch & _LOW).astype(np.uint32), (sketch != _EMPTY).all(axis=1)


def band_hashes(values: np.ndarray, bands: int) -> np.ndarray:
    """Return uint64 (bands, documents): a hash of each band, which is `permutations // bands` columns of `values`."""
    rows = values.shape[1] // bands
    hashes = np.zeros((bands, len(values)), np.uint64)
    for row, factor in enumerate(_factors(rows)):
        hashes += values[:, row : rows * bands : rows].T * factor
    return mix(hashes)


def low_bytes(values: np.ndarray) -> np.ndarray:
    """Return uint8 of the same shape: b-bit minwise hashing with b = 8 (Li and König 2010), a quarter of the size.

    Takes 8 bits of each value after a multiplication that mixes all of its bits into them.
    """
    return (values * np.uint32(0x9E3779B1) >> np.uint32(24)).astype(np.uint8)


def similarity(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return float64 (pairs,): estimated Jaccard similarity of uint8 (pairs, permutations); permutations is a multiple
    of 8.

    Corrected for different values having the same byte, with probability 1/256 (Li and König 2010).
    """
    equal = (one == other).view(np.uint64).sum(axis=1)  # each byte counts up to permutations / 8
    agreeing = equal.view(np.uint8).reshape(len(one), 8).sum(axis=1) / one.shape[1]
    return (agreeing - 1 / 256) / (1 - 1 / 256)


def candidate_probability(jaccard: float, bands: int, rows: int) -> float:
    """Return the probability that two documents agree in all rows of at least one band: 1 - (1 - J^rows)^bands."""
    return 1.0 - (1.0 - jaccard**rows) ** bands


def accepted_probability(jaccard: float, threshold: float, permutations: int) -> float:
    """Return the probability that the estimate by `similarity` is at least `threshold`; a binomial tail."""
    agree = jaccard + (1 - jaccard) / 256
    least = math.ceil(permutations * (threshold * (1 - 1 / 256) + 1 / 256) - 1e-9)
    return sum(
        math.comb(permutations, equal) * agree**equal * (1 - agree) ** (permutations - equal)
        for equal in range(least, permutations + 1)
    )


def choose_bands(threshold: float, permutations: int) -> int:
    """Return the fewest bands with which a pair at the threshold is a candidate with probability RECALL.

    Candidates are checked by their whole signatures, so bands only have to miss none; fewer bands mean less sorting
    and fewer pairs to check. If none reaches RECALL, bands of one row.
    """
    for bands in range(1, permutations):
        if candidate_probability(threshold, bands, permutations // bands) >= RECALL:
            return bands
    return permutations


def _throw(
    sketch: np.ndarray, hashes: np.ndarray, documents: np.ndarray, rounds: range
) -> tuple[np.ndarray, np.ndarray]:
    """Throw the elements in each round; return those of documents that later rounds can still change.

    A round cannot change a document whose bins all hold values of earlier rounds, so the order of the elements does not
    matter, and a long document may come in parts.
    """
    permutations = sketch.shape[1]
    bins = sketch.reshape(-1)
    factors = _factors(2 * permutations)
    elements = np.bincount(documents, minlength=len(sketch))
    at = np.flatnonzero(elements)
    bases = documents * permutations
    look = rounds.start
    for number in rounds:
        if not len(at):
            break
        thrown = hashes * factors[number]
        if number >= permutations:  # bins still empty get the smallest of all elements, one bin per round
            chosen = bases + (number - permutations)
        elif permutations & (permutations - 1) == 0:  # the same bin as below, in fewer operations
            chosen = (thrown >> np.uint64(65 - permutations.bit_length())).view(np.int64)
            chosen += bases
        else:
            chosen = ((thrown >> _HALF) * np.uint64(permutations) >> _HALF).view(np.int64)
            chosen += bases
        thrown &= _LOW
        thrown |= np.uint64(number << 32)
        np.minimum.at(bins, chosen, thrown)
        if number == look or number + 1 == rounds.stop:
            look += max(1, number // 4)
            ripe = at[elements[at] * (number + 1) > 3 * permutations]  # fewer throws hardly fill all bins
            is_open = np.zeros(len(sketch), dtype=bool)
            is_open[at] = True
            is_open[ripe] = sketch[ripe].max(axis=1) >= np.uint64((number + 1) << 32)
            if is_open[at].mean() < _WORTH_COPYING or number + 1 == rounds.stop:
                again = np.flatnonzero(is_open[documents])
                at = np.flatnonzero(is_open)
                hashes, documents = hashes[again], documents[again]
                bases = documents * permutations
    return hashes, documents


@cache
def _factors(count: int) -> np.ndarray:
    """Return uint64 (count,): fixed odd multipliers that look random."""
    return mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)) | np.uint64(1)
