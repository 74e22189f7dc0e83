"""What a sample is, and what is predicted in it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.shards import open_dataset
from pretrain.keyed import random_bits
from pretrain.objectives import clm, mlm_nsp
from pretrain.objectives.masking import mask_pieces

SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
VOCAB = 100


def keys_of(*numbers: int) -> np.ndarray:
    return random_bits(9, np.array(numbers, np.uint64))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(8, 60), min_size=1, max_size=6), rate=st.sampled_from([0.05, 0.15, 0.4]))
def test_masking_takes_a_fixed_count_and_never_a_special_piece(lengths: list[int], rate: float) -> None:
    rng = np.random.default_rng(len(lengths))
    ids = np.zeros((len(lengths), max(lengths)), np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.integers(5, VOCAB, length)
        ids[row, [0, length // 2, length - 1]] = [2, 3, 3]
    masked, at, original = mask_pieces(ids, np.array(lengths), keys_of(*range(len(lengths))), rate, SPECIAL, VOCAB)
    row, column = np.divmod(at, ids.shape[1])
    assert np.bincount(row, minlength=len(lengths)).tolist() == [
        min(max(1, round(rate * length)), length - 3) for length in lengths
    ]
    assert (original >= 5).all() and (column < np.array(lengths)[row]).all()
    assert (ids[row, column] == original).all()
    untouched = np.ones_like(ids, bool)
    untouched[row, column] = False
    assert (masked == ids)[untouched].all()


def test_a_mask_depends_on_the_key_and_not_on_the_batch() -> None:
    ids = np.random.default_rng(0).integers(5, VOCAB, (4, 40))
    lengths = np.array([40, 40, 30, 40])
    together, *_ = mask_pieces(ids, lengths, keys_of(1, 2, 3, 4), 0.15, SPECIAL, VOCAB)
    alone, *_ = mask_pieces(ids[2:3, :30], lengths[2:3], keys_of(3), 0.15, SPECIAL, VOCAB)
    assert (together[2, :30] == alone[0]).all()
    other, *_ = mask_pieces(ids[2:3, :30], lengths[2:3], keys_of(5), 0.15, SPECIAL, VOCAB)
    assert (other != alone).any()


def test_eight_of_ten_are_masked_one_is_random_one_stays() -> None:
    ids = np.full((400, 102), 50, np.int64)
    masked, at, _ = mask_pieces(ids, np.full(400, 102), keys_of(*range(400)), 0.15, SPECIAL, VOCAB)
    seen = masked.ravel()[at]
    assert abs((seen == 4).mean() - 0.8) < 0.02
    assert abs((seen == 50).mean() - 0.1) < 0.02
    assert seen.min() >= 4


@pytest.mark.parametrize("seq_len", [32, 64, 128])
def test_sentence_pairs_are_laid_out_by_the_original_rules(bert_data: Path, seq_len: int) -> None:
    documents = open_dataset(bert_data).train
    index = mlm_nsp.build_index(documents, seq_len, key=3)
    assert (index == mlm_nsp.build_index(documents, seq_len, key=3)).all()
    length_a, length_b = index[:, 2] - index[:, 1], index[:, 5] - index[:, 4]
    assert length_a.min() >= 1 and length_b.min() >= 1
    assert (length_a + length_b).max() <= seq_len - 3
    random_next = index[:, 6] == 1
    assert (index[random_next, 0] != index[random_next, 3]).all()
    assert (index[~random_next, 0] == index[~random_next, 3]).all()
    assert 0.35 < random_next.mean() < 0.75
    for document, start, stop, other, other_start, other_stop, _ in index.tolist():
        assert 0 <= start < stop <= documents.lengths[document]
        assert 0 <= other_start < other_stop <= documents.lengths[other]
    untouched = ~random_next & (length_a + length_b < seq_len - 3)
    assert (index[untouched, 2] == index[untouched, 4]).all()  # the second follows the first where nothing was cut


def test_a_pair_becomes_cls_a_sep_b_sep(bert_data: Path) -> None:
    data = open_dataset(bert_data)
    index = mlm_nsp.build_index(data.train, 64, key=3)
    samples = np.array([5, 17, 2])
    batch = mlm_nsp.assemble(
        data.train, mlm_nsp.look_up(index, samples, 64), keys_of(1, 2, 3), 64, data.manifest.tokenizer, 0.15
    )
    ids = batch.inputs["input_ids"].copy()
    ids.ravel()[batch.inputs["masked_at"]] = batch.targets
    for row, (document, start, stop, other, other_start, other_stop, is_random) in enumerate(index[samples].tolist()):
        a, b = data.train.tokens(document)[start:stop], data.train.tokens(other)[other_start:other_stop]
        expected = [2, *a.tolist(), 3, *b.tolist(), 3]
        assert ids[row].tolist() == expected + [0] * (ids.shape[1] - len(expected))
        assert batch.inputs["segments"][row].sum() == len(b) + 1
        assert batch.inputs["lengths"][row] == len(expected)
        assert batch.inputs["is_random_next"][row] == is_random
    assert batch.counts == {"token": len(batch.targets), "nsp": 3}


def test_one_document_is_too_few_for_next_sentences(bert_data: Path) -> None:
    class One:
        def __len__(self) -> int:
            return 1

    with pytest.raises(ValueError, match="draws from another document"):
        mlm_nsp.build_index(One(), 64, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("seq_len", [8, 33, 100])
def test_the_stream_is_cut_without_loss(gpt2_data: Path, seq_len: int) -> None:
    data = open_dataset(gpt2_data)
    end = data.manifest.tokenizer.special_ids["end"]
    stream = [piece for i in range(len(data.train)) for piece in [*data.train.tokens(i).tolist(), end]]
    index = clm.build_index(data.train, seq_len, 0)
    count = clm.sample_count(index, seq_len)
    assert count == (len(stream) - 1) // seq_len
    keys = np.zeros(count, np.uint64)
    batch = clm.assemble(
        data.train, clm.look_up(index, np.arange(count), seq_len), keys, seq_len, data.manifest.tokenizer, 0.15
    )
    assert batch.inputs["input_ids"].ravel().tolist() == stream[: count * seq_len]
    assert batch.targets.tolist() == stream[1 : count * seq_len + 1]
