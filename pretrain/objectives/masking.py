"""Which pieces a masked-word model has to predict, and what stands in their place (Devlin et al. 2018, section 3.1)."""

import numpy as np
from numpy.typing import NDArray

from data_prep.manifest import TokenizerInfo, word_start_flags
from pretrain.config import ObjectiveConfig
from pretrain.keyed import UInt64, random_bits, uniform

_SPAN_STOP = 0.2
_LONGEST_SPAN = 10
SPAN_SHARES = _SPAN_STOP * (1 - _SPAN_STOP) ** np.arange(_LONGEST_SPAN)
SPAN_SHARES /= SPAN_SHARES.sum()
"""How often a span is 1, 2, … words long: geometric, cut off and renormalised, 3.8 words in the mean (Joshi et al.
2020, section 3.1; the authors' `PairWithSpanMaskingScheme`)."""
NGRAM_SHARES = 1 / np.arange(1, 4)
NGRAM_SHARES /= NGRAM_SHARES.sum()
"""How often an n-gram is 1, 2 or 3 words long: p(n) = (1/n) / (1 + 1/2 + 1/3) (Lan et al. 2020, section 4.1)."""


def mask(
    input_ids: NDArray[np.int64],
    bounds: NDArray[np.int64],
    places: NDArray[np.int64],
    keys: UInt64,
    objective: ObjectiveConfig,
    tokenizer: TokenizerInfo,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Mask a fixed count of each sequence's pieces, never special ones.

    As in the original, a sequence of n pieces (special ones counted) gets min(max_predictions, max(1,
    round(mask_rate * n))) predictions; whole words may leave a few of them unused. Of the chosen pieces 80 % become
    [MASK], 10 % a random ordinary piece, 10 % stay; under masking=spans all pieces of a span fare alike.

    Args:
        input_ids: int64 (N,), the sequences one behind the other.
        bounds: int64 (S + 1,), where each begins, and N; none is empty.
        places: int64 (N,), each piece's place in its sample. The same key masks the same pieces at the same places in
            the same way, wherever they stand in a batch.
        keys: uint64 (S,), that of the sample that each sequence is part of.

    Returns:
        The masked copy, int64 (N,); the positions in it to predict, int64 (M,), ascending; what stood there.
    """
    specials = sorted(tokenizer.special_ids.values())
    lengths = np.diff(bounds)
    maskable = ~np.isin(input_ids, specials)
    budgets = np.maximum(1, np.rint(objective.mask_rate * lengths)).astype(np.int64)
    if objective.max_predictions is not None:
        budgets = np.minimum(budgets, objective.max_predictions)
    budgets = np.minimum(budgets, np.add.reduceat(maskable, bounds[:-1], dtype=np.int64))

    counters, piece_keys = places.astype(np.uint64), np.repeat(keys, lengths)
    if objective.masking == "pieces":
        chosen = _choose_pieces(maskable, bounds, random_bits(piece_keys, counters), budgets)
    else:
        starts = word_start_flags(tokenizer)[input_ids]
        chosen = _choose_words(maskable, bounds, starts, piece_keys, counters, budgets, objective.masking)

    at = np.flatnonzero(chosen)
    own_keys, own_counters = piece_keys[at], counters[at]
    together = _first_of_run(at, bounds) if objective.masking == "spans" else at
    action = uniform(random_bits(own_keys ^ np.uint64(1), counters[together]))
    ordinary = tokenizer.vocab_size - len(specials)
    random_piece = (uniform(random_bits(own_keys ^ np.uint64(2), own_counters)) * ordinary).astype(np.int64)
    for special in specials:  # ascending: counts them out of the range
        random_piece += random_piece >= special
    original = input_ids[at]
    masked = input_ids.copy()
    masked[at] = np.where(action < 0.8, tokenizer.special_ids["mask"], np.where(action < 0.9, random_piece, original))
    return masked, at, original


def _choose_pieces(
    maskable: NDArray[np.bool_], bounds: NDArray[np.int64], ranks: UInt64, budgets: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The pieces of the lowest ranks, as many as each sequence's budget; no two of a sequence have the same rank."""
    lengths = np.diff(bounds)
    ranks[~maskable] = np.iinfo(np.uint64).max
    grid = np.full((len(lengths), lengths.max()), np.iinfo(np.uint64).max, np.uint64)
    grid[np.arange(grid.shape[1]) < lengths[:, None]] = ranks
    grid.sort(axis=1)
    highest = grid[np.arange(len(lengths)), np.maximum(budgets - 1, 0)]
    return maskable & (ranks <= np.repeat(highest, lengths))


def _choose_words(
    maskable: NDArray[np.bool_],
    bounds: NDArray[np.int64],
    starts: NDArray[np.bool_],
    piece_keys: UInt64,
    counters: UInt64,
    budgets: NDArray[np.int64],
    masking: str,
) -> NDArray[np.bool_]:
    """Whole words in random order, each with those behind it that are chosen with it, while the budget lasts."""
    follows = np.concatenate([[False], maskable[:-1]])
    follows[bounds[:-1]] = False
    begins = maskable & (starts | ~follows)
    first = np.flatnonzero(begins)
    if len(first) == 0:
        return begins
    sizes = np.add.reduceat(maskable, first, dtype=np.int64)
    sequence = np.searchsorted(bounds, first, side="right") - 1
    order = np.lexsort([random_bits(piece_keys[first], counters[first]), sequence]).tolist()

    if masking == "words":
        reach = np.ones(len(first), np.int64)
    else:
        run_ends = np.flatnonzero(np.append(~follows[first[1:]], True))  # the words before which text ends
        left = run_ends[np.searchsorted(run_ends, np.arange(len(first)))] - np.arange(len(first)) + 1
        drawn = uniform(random_bits(piece_keys[first] ^ np.uint64(3), counters[first]))
        if masking == "spans":
            reach = np.minimum(1 + np.searchsorted(np.cumsum(SPAN_SHARES)[:-1], drawn, side="right"), left)
        else:  # where the text ends before the longest n-gram, the shorter ones share its part
            shares = np.cumsum(NGRAM_SHARES)
            drawn *= shares[np.minimum(left, len(shares)) - 1]
            reach = 1 + np.searchsorted(shares[:-1], drawn, side="right")

    taken = np.zeros(len(first), bool)
    _take_words(taken.data, order, np.searchsorted(sequence, np.arange(len(bounds))).tolist(), sizes.tolist(),
                reach.tolist(), budgets.tolist(), overlap=masking == "spans")  # fmt: skip
    return maskable & taken[np.cumsum(begins) - 1]


def _take_words(
    taken: memoryview,
    order: list[int],
    word_bounds: list[int],
    sizes: list[int],
    reach: list[int],
    budgets: list[int],
    overlap: bool,
) -> None:
    """Mark words as taken: what does not fit any more is passed over, and more than one word is shortened to fit.

    Args:
        overlap: whether words may run into some that are taken, and become one span with them, as SpanBERT's do; if
            not, they are passed over, as ALBERT's n-grams are.
    """
    for number, left in enumerate(budgets):
        for word in order[word_bounds[number] : word_bounds[number + 1]]:
            if left == 0:
                break
            stop = word + reach[word]
            if taken[word] or (not overlap and any(taken[word:stop])):
                continue
            for each in range(word, stop):
                if taken[each]:
                    continue
                if sizes[each] > left:
                    break
                taken[each] = True
                left -= sizes[each]


def _first_of_run(at: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of some ascending positions the first of those of its sequence that follow on each other up to it."""
    sequence = np.searchsorted(bounds, at, side="right")
    begins = (np.diff(at, prepend=-2) > 1) | (np.diff(sequence, prepend=0) > 0)
    return at[begins][np.cumsum(begins) - 1]
