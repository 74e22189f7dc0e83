"""Batches of pairs by tokens: each pair once per epoch, sides within the limit, similar lengths, random access."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multihop.pretrain.data.token_batches import TokenBatches

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=300)


@given(lengths=LENGTHS, room=st.integers(0, 900), epochs=st.tuples(st.integers(0, 3), st.integers(4, 7)))
def test_each_pair_is_in_one_batch_of_an_epoch(lengths: list[int], room: int, epochs: tuple[int, int]) -> None:
    longest = np.sort(np.array(lengths, np.int64))
    tokens = int(longest[-1]) + room
    batches = TokenBatches(longest, tokens)
    numbers = np.arange(len(batches))
    for epoch in epochs:
        of_epoch = [batches.pairs(number, "order", epoch) for number in numbers.tolist()]
        assert np.array_equal(np.sort(np.concatenate(of_epoch)), np.arange(len(longest)))
        assert [len(each) for each in of_epoch] == batches.sizes(numbers).tolist()
        assert min(map(len, of_epoch)) > 0
        assert max(len(each) * int(longest[each].max()) for each in of_epoch) <= tokens


@given(lengths=LENGTHS, room=st.integers(0, 900))
@example(lengths=[2] * 7 + [3], room=3)
def test_a_batch_with_other_lengths_would_not_be_full_without_them(lengths: list[int], room: int) -> None:
    longest = np.sort(np.array(lengths, np.int64))
    tokens = int(longest[-1]) + room
    batches = TokenBatches(longest, tokens)
    pairs = [batches.pairs(number, 0) for number in range(len(batches))]
    for each in pairs:
        shortest = int(longest[each].min())
        similar = (longest >= shortest) & (longest <= shortest * 9 // 8)
        if longest[each].max() > shortest * 9 // 8:
            # Its class was short of pairs for a batch, or is the last one, which takes what is left.
            in_last_class = len(batches.longest) == 1 or shortest > batches.longest[-2]
            assert similar.sum() < tokens // shortest or in_last_class


def test_batches_are_full_and_of_similar_length_where_there_are_many_pairs() -> None:
    longest = np.sort(np.random.default_rng(0).integers(5, 101, 50_000))
    batches = TokenBatches(longest, 2_000)
    pairs = [batches.pairs(number, 0) for number in range(len(batches))]
    tokens = np.array([longest[each].sum() for each in pairs])
    assert tokens.max() <= 2_000 and tokens.mean() > 1_800
    assert all(longest[each].max() <= longest[each].min() * 9 // 8 for each in pairs)


def test_epochs_make_other_batches_of_the_same_pairs() -> None:
    batches = TokenBatches(np.full(1_000, 10), 200)
    first, second = (sorted(map(tuple, (np.sort(batches.pairs(i, e)) for i in range(len(batches))))) for e in (0, 1))
    assert len(batches) == 50 and not set(first) & set(second)


def test_a_limit_below_the_longest_pair_is_no_batch() -> None:
    with pytest.raises(AssertionError):
        TokenBatches(np.array([3, 9]), 8)
