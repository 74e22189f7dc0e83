"""Masking for masked language modeling: which tokens to predict, and what replaces them (Devlin et al. 2018, section
3.1)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64, random_bits, uniform
from multihop.data_prep.tokenizers.info import TokenizerInfo, word_start_flags
from multihop.pretrain.objectives.config import ObjectiveConfig

_SPAN_STOP_PROBABILITY = 0.2
_MAX_SPAN_WORDS = 10
SPAN_SHARES = _SPAN_STOP_PROBABILITY * (1 - _SPAN_STOP_PROBABILITY) ** np.arange(_MAX_SPAN_WORDS)
SPAN_SHARES /= SPAN_SHARES.sum()
"""Probabilities of spans of 1, 2, … words: geometric, clipped and renormalized, with a mean of 3.8 words (Joshi et al.
2020, section 3.1; the authors' `PairWithSpanMaskingScheme`)."""
NGRAM_SHARES = 1 / np.arange(1, 4)
NGRAM_SHARES /= NGRAM_SHARES.sum()
"""Probabilities of n-grams of 1, 2 and 3 words: p(n) = (1/n) / (1 + 1/2 + 1/3) (Lan et al. 2020, section 4.1)."""


def mask_tokens(
    input_ids: NDArray[np.int64],
    cu_seqlens: NDArray[np.int64],
    offsets: NDArray[np.int64],
    keys: UInt64,
    objective: ObjectiveConfig,
    tokenizer: TokenizerInfo,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Mask a fixed number of each sequence's tokens, never special ones.

    As in the original, a sequence of n tokens, special ones included, gets min(max_predictions, max(1,
    round(mask_rate * n))) predictions; with whole words, a few of them may stay unused. Of the chosen tokens 80 %
    become [MASK], 10 % a random ordinary token, and 10 % stay; with masking=spans, all tokens of a span are treated
    alike.

    Args:
        input_ids: int64 (N,), packed sequences.
        cu_seqlens: int64 (S + 1,), cumulative sequence lengths, from 0 to N; no sequence is empty.
        offsets: int64 (N,), each token's offset in its sample: the mask depends on the offsets and the key, not on the
            sample's position in a batch.
        keys: uint64 (S,), for each sequence the key of its sample.

    Returns:
        The masked copy, int64 (N,); the positions to predict, int64 (M,), ascending; the original tokens at them.
    """
    specials = sorted(tokenizer.special_ids.values())
    lengths = np.diff(cu_seqlens)
    maskable = ~np.isin(input_ids, specials)
    budgets = np.minimum(
        prediction_budgets(lengths, objective), np.add.reduceat(maskable, cu_seqlens[:-1], dtype=np.int64)
    )

    counters, token_keys = offsets.astype(np.uint64), np.repeat(keys, lengths)
    if objective.masking == "tokens":
        chosen = _choose_tokens(maskable, cu_seqlens, random_bits(token_keys, counters), budgets)
    else:
        starts = word_start_flags(tokenizer)[input_ids]
        shares = {"spans": SPAN_SHARES, "ngrams": NGRAM_SHARES}.get(objective.masking)
        overlap = objective.masking == "spans"
        chosen = choose_spans(maskable, cu_seqlens, starts, token_keys, counters, budgets, shares, overlap)

    at = np.flatnonzero(chosen)
    keys_at, counters_at = token_keys[at], counters[at]
    action_positions = _first_of_run(at, cu_seqlens) if objective.masking == "spans" else at
    action = uniform(random_bits(keys_at ^ np.uint64(1), counters[action_positions]))
    ordinary = tokenizer.vocab_size - len(specials)
    random_token = (uniform(random_bits(keys_at ^ np.uint64(2), counters_at)) * ordinary).astype(np.int64)
    for special in specials:  # in ascending order, which excludes each from the range
        random_token += random_token >= special
    original = input_ids[at]
    masked = input_ids.copy()
    masked[at] = np.where(action < 0.8, tokenizer.special_ids["mask"], np.where(action < 0.9, random_token, original))
    return masked, at, original


def prediction_budgets(lengths: NDArray[np.int64], objective: ObjectiveConfig) -> NDArray[np.int64]:
    """int64 (S,): the number of predictions in sequences of these lengths, special tokens included."""
    budgets = np.maximum(1, np.rint(objective.mask_rate * lengths)).astype(np.int64)
    return budgets if objective.max_predictions is None else np.minimum(budgets, objective.max_predictions)


def _choose_tokens(
    maskable: NDArray[np.bool_], cu_seqlens: NDArray[np.int64], ranks: UInt64, budgets: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Choose the tokens of the lowest ranks, as many as each sequence's budget; ranks are unique within a sequence."""
    lengths = np.diff(cu_seqlens)
    ranks[~maskable] = np.iinfo(np.uint64).max
    grid = np.full((len(lengths), lengths.max()), np.iinfo(np.uint64).max, np.uint64)
    grid[np.arange(grid.shape[1]) < lengths[:, None]] = ranks
    grid.sort(axis=1)
    highest = grid[np.arange(len(lengths)), np.maximum(budgets - 1, 0)]
    return maskable & (ranks <= np.repeat(highest, lengths))


def choose_spans(
    maskable: NDArray[np.bool_],
    cu_seqlens: NDArray[np.int64],
    starts: NDArray[np.bool_],
    token_keys: UInt64,
    counters: UInt64,
    budgets: NDArray[np.int64],
    shares: NDArray[np.floating[Any]] | None,
    overlap: bool,
) -> NDArray[np.bool_]:
    """Choose whole words in random order, each with the following words of its span, up to each sequence's budget.

    Args:
        maskable: bool (N,), the tokens that may be chosen.
        starts: bool (N,), whether each token begins a word.
        token_keys, counters: uint64 (N,), what each token's random numbers depend on.
        shares: the probabilities of spans of 1, 2, … words; None: single words.
        overlap: as in `_take_words`. If so, a span ends where the text ends; if not, the shares of spans that are too
            long for the text go to shorter ones.

    Returns:
        bool (N,).
    """
    follows = np.concatenate([[False], maskable[:-1]])
    follows[cu_seqlens[:-1]] = False
    begins = maskable & (starts | ~follows)
    first = np.flatnonzero(begins)
    if len(first) == 0:
        return begins
    sizes = np.add.reduceat(maskable, first, dtype=np.int64)
    sequence = np.searchsorted(cu_seqlens, first, side="right") - 1
    order = np.lexsort([random_bits(token_keys[first], counters[first]), sequence]).tolist()

    if shares is None:
        reach = np.ones(len(first), np.int64)
    else:
        run_ends = np.flatnonzero(np.append(~follows[first[1:]], True))  # the last word of each run of adjacent words
        left = run_ends[np.searchsorted(run_ends, np.arange(len(first)))] - np.arange(len(first)) + 1
        drawn = uniform(random_bits(token_keys[first] ^ np.uint64(3), counters[first]))
        bounds = np.cumsum(shares)
        if not overlap:
            drawn *= bounds[np.minimum(left, len(bounds)) - 1]
        reach = np.minimum(1 + np.searchsorted(bounds[:-1], drawn, side="right"), left)

    taken = np.zeros(len(first), bool)
    _take_words(taken.data, order, np.searchsorted(sequence, np.arange(len(cu_seqlens))).tolist(), sizes.tolist(),
                reach.tolist(), budgets.tolist(), overlap)  # fmt: skip
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
    """Mark words as taken. A word that no longer fits is skipped; a span or n-gram is shortened to fit.

    Args:
        overlap: whether a span may include words that are taken already, as in SpanBERT; if not, it is skipped, as
            ALBERT's n-grams are.
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


def _first_of_run(at: NDArray[np.int64], cu_seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of some ascending positions, the first position of its run of adjacent ones within a sequence."""
    sequence = np.searchsorted(cu_seqlens, at, side="right")
    begins = (np.diff(at, prepend=-2) > 1) | (np.diff(sequence, prepend=0) > 0)
    return at[begins][np.cumsum(begins) - 1]
