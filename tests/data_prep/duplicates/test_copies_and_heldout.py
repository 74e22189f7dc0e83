import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from multihop.data_prep.duplicates.exact import first_occurrence_mask
from multihop.data_prep.stages.documents import content_hash, heldout_mask

WORDS = st.lists(st.integers(0, 3) | st.integers(0, 2**64 - 1), max_size=60)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.randoms())
def test_of_equal_contents_exactly_the_first_is_kept(pairs, rng):
    first, size = (np.array([pair[k] for pair in pairs], dtype=kind) for k, kind in ((0, np.uint64), (1, np.uint32)))
    keep = first_occurrence_mask(first, size)
    expected = [pair not in pairs[:i] for i, pair in enumerate(pairs)]
    assert keep.tolist() == expected


@given(WORDS, st.floats(0, 0.999), st.floats(0, 0.999))
def test_held_out_documents_stay_held_out_when_the_share_grows(words, one, other):
    second = np.array(words, dtype=np.uint64)
    low, high = sorted((one, other))
    assert not (heldout_mask(second, low) & ~heldout_mask(second, high)).any()
    assert not heldout_mask(second, 0.0).any()


def test_the_held_out_share_is_what_was_requested_and_independent_of_the_id():
    hashes = np.array([content_hash(str(number)) for number in range(20_000)], dtype=np.uint64)
    held = heldout_mask(hashes[:, 1], 0.1)
    assert abs(held.mean() - 0.1) < 0.01
    smallest = np.argsort(hashes[:, 0])[:5_000]
    assert abs(held[smallest].mean() - 0.1) < 0.02
