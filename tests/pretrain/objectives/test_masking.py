"""Which tokens are chosen to be predicted, and what replaces them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_shards import BERT, tokenizer_of

from multihop.common.counter_rng import random_bits
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.masking import mask_tokens
from multihop.pretrain.packed_tokens import pack_sequences

VOCAB = 100
MASKINGS = ["tokens", "words", "spans", "ngrams"]
STARTS = np.arange(VOCAB) % 3 != 2  # words of one token and of two, where tokens count up


def keys_of(*numbers: int) -> np.ndarray:
    return random_bits(9, np.array(numbers, np.uint64))


def masked(
    sequences: list[list[int]], keys: np.ndarray, starts: np.ndarray = STARTS, **rules: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask sequences that are samples of their own; returns the result of `mask`."""
    text, objective = pack_sequences(sequences), ObjectiveConfig(name="mlm", **rules)
    return mask_tokens(text.input_ids, text.cu_seqlens, text.positions, keys, objective, tokenizer_of(starts))


def close(share: float, expected: float, trials: int) -> bool:
    """Return whether a share is within five standard deviations of its expectation over so many independent trials."""
    return bool(abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / trials))


def runs(positions: np.ndarray) -> np.ndarray:
    """Return the lengths of the runs of consecutive numbers."""
    edges = np.flatnonzero(np.diff(positions) > 1) + 1
    return np.diff([0, *edges, len(positions)])


def words_of(sequence: list[int], starts: np.ndarray) -> list[list[int]]:
    """Return the positions of each word's tokens, computed differently from the code."""
    found: list[list[int]] = []
    for place, token in enumerate(sequence):
        if token < 5:
            continue
        if starts[token] or place == 0 or sequence[place - 1] < 5:
            found.append([])
        found[-1].append(place)
    return found


def test_pieces_are_masked_as_they_always_were() -> None:
    sequences = []
    for row, length in enumerate([60, 17, 33, 8]):
        ids = 5 + (np.arange(length) * (7 + row)) % 95
        ids[[0, length // 2, length - 1]] = [2, 3, 3]
        sequences.append(ids.tolist())
    shown, at, _ = masked(sequences, keys_of(1, 2, 3, 4))
    starts = np.repeat([0, 60, 77, 110], [9, 3, 5, 1])
    assert (at - starts).tolist() == [2, 11, 14, 18, 21, 24, 31, 50, 57, 1, 7, 14, 2, 13, 26, 29, 31, 2]
    assert shown[at].tolist() == [4] * 16 + [94, 4]


@pytest.mark.parametrize("masking", MASKINGS)
@given(
    sequences=st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=60), min_size=1, max_size=6),
    rate=st.sampled_from([0.05, 0.15, 0.4]),
    most=st.sampled_from([None, 1, 4]),
)
def test_a_fixed_count_of_each_sequence_and_never_a_special_token(
    masking: str, sequences: list[list[int]], rate: float, most: int | None
) -> None:
    keys = keys_of(*range(len(sequences)))
    rules: dict[str, Any] = {"masking": masking, "mask_rate": rate, "max_predictions": most}
    shown, at, original = masked(sequences, keys, **rules)
    ids = np.concatenate([*map(np.array, sequences)])
    assert (np.diff(at) > 0).all() and (original >= 5).all() and (ids[at] == original).all()
    assert (np.delete(shown, at) == np.delete(ids, at)).all()
    assert np.isin(shown[at], [1, 2, 3, 0], invert=True).all()
    first = 0
    for number, sequence in enumerate(sequences):
        mine = set(at[(at >= first) & (at < first + len(sequence))] - first)
        asked = max(1, round(rate * len(sequence)))
        budget = min(asked if most is None else min(most, asked), sum(token >= 5 for token in sequence))
        assert len(mine) <= budget
        if masking == "tokens":
            assert len(mine) == budget
        else:
            words = [set(word) for word in words_of(sequence, STARTS)]
            assert all(word <= mine or not word & mine for word in words)
            if masking != "ngrams":  # a word is passed over for want of room alone
                assert all(len(word) > budget - len(mine) for word in words if not word & mine)
        alone, at_alone, _ = masked([sequence], keys[[number]], **rules)
        assert (at_alone == sorted(mine)).all() and (alone == shown[first : first + len(sequence)]).all()
        first += len(sequence)


@pytest.mark.parametrize("masking", MASKINGS)
def test_other_keys_choose_otherwise(masking: str) -> None:
    text = list(range(5, VOCAB)) * 2
    chosen = [tuple(masked([text], keys_of(key), masking=masking)[1]) for key in range(20)]
    assert len(set(chosen)) == 20


@pytest.mark.parametrize("masking", MASKINGS)
def test_eight_of_ten_are_masked_one_is_random_one_stays(masking: str) -> None:
    sequences = [[2, *[50, 51] * 50, 3]] * 600
    starts = np.arange(VOCAB) != 51  # words of two tokens
    shown, at, original = masked(sequences, keys_of(*range(600)), starts, masking=masking)
    seen = shown[at]
    if masking == "spans":  # which fare as one
        whole = np.flatnonzero(np.diff(at, prepend=-2) > 1)
        for run in np.split(np.arange(len(at)), whole[1:]):
            assert (seen[run] == 4).all() or (seen[run] != 4).all()
            assert len(run) < 4 or (seen[run] == original[run]).all() or (seen[run] != original[run]).any()
        seen, original = seen[whole], original[whole]
    assert close((seen == 4).mean(), 0.8, len(seen))
    # One of 95 random tokens is the original one.
    assert close((seen == original).mean(), 0.1 + 0.1 / 95, len(seen))
    random = seen[(seen != 4) & (seen != original)]
    assert random.min() == 5 and random.max() == VOCAB - 1
    counts = np.bincount(random, minlength=VOCAB)[5:]
    assert counts.max() < len(random) / 94 + 6 * np.sqrt(len(random) / 94)


@pytest.mark.parametrize("masking", ["tokens", "words"])
def test_every_place_is_as_likely(masking: str) -> None:
    samples = 4000
    sequence = [2, *([51] * 40), 3, *([60] * 23), 3]
    _, at, _ = masked([sequence] * samples, keys_of(*range(samples)), masking=masking)
    counts = np.bincount(at % len(sequence), minlength=len(sequence))
    share = 10 / 63
    assert counts.sum() == 10 * samples and counts[[0, 41, 65]].sum() == 0
    ordinary = np.delete(counts, [0, 41, 65])
    assert np.abs(ordinary - samples * share).max() < 5 * np.sqrt(samples * share * (1 - share))
    # As spread as such draws are: neither drawn to some places nor dealt out evenly.
    assert 0.5 < ((ordinary - samples * share) ** 2).mean() / (samples * share * (1 - share)) < 1.7


@pytest.mark.parametrize("word", [1, 2])
@pytest.mark.parametrize(
    ("masking", "shares"),
    [("spans", [0.2 * 0.8**k / (1 - 0.8**10) for k in range(10)]), ("ngrams", [6 / 11, 3 / 11, 2 / 11])],
)
def test_lengths_are_distributed_as_published(masking: str, shares: list[float], word: int) -> None:
    tokens, count = 20000, 40
    text = [50, 51][:word] * (tokens // word)
    starts = np.arange(VOCAB) != 51
    # So few of so many that they hardly meet each other or the end of what is asked for.
    _, at, _ = masked([text] * count, keys_of(*range(count)), starts, masking=masking, mask_rate=0.01)
    assert len(at) == count * 200
    lengths, odd = np.divmod(runs(at), word)
    assert not odd.any()
    found = np.bincount(lengths, minlength=len(shares) + 1)[1:]
    assert found[len(shares) :].sum() < 0.03 * len(lengths)
    for share, expected in zip(found / len(lengths), shares, strict=False):
        assert abs(share - expected) < 0.015 + 5 * np.sqrt(expected * (1 - expected) / len(lengths))
    mean = sum(share * (1 + k) for k, share in enumerate(shares))
    assert abs(lengths.mean() - mean) < 0.08 * mean
    if masking == "spans":
        assert abs(mean - 3.8) < 0.01  # the paper's


def test_spans_start_anywhere() -> None:
    samples, length = 3000, 200
    _, at, _ = masked([[60] * length] * samples, keys_of(*range(samples)), masking="spans", max_predictions=1)
    counts = np.bincount(at % length, minlength=length)
    assert len(at) == samples and counts.max() < 15 + 6 * np.sqrt(15)


def test_spans_and_ngrams_end_where_the_text_ends() -> None:
    sequence = [2, *[60, 3] * 60]
    keys = keys_of(*range(50))
    words = masked([sequence] * 50, keys, masking="words", mask_rate=0.2)[1]
    for masking in ("spans", "ngrams"):  # longer ones would bring their neighbors with them
        assert (masked([sequence] * 50, keys, masking=masking, mask_rate=0.2)[1] == words).all()


def test_a_sequence_without_ordinary_pieces_is_asked_nothing() -> None:
    for masking in MASKINGS:
        shown, at, _ = masked([[2, 1, 3], [2, 3]], keys_of(1, 2), masking=masking)
        assert shown.tolist() == [2, 1, 3, 2, 3] and len(at) == 0
    assert BERT["mask"] == 4
