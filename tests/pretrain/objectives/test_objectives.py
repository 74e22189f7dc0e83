"""Samples of the objectives: pairs of segments, and the stream of documents."""

import hashlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_shards import FIRST, GPT2, documents_of, tokenizer_of

from multihop.common.counter_rng import random_bits
from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import Documents, open_dataset
from multihop.data_prep.tokenizers.special_tokens import SPECIAL_TOKENS
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives import clm, sentence_pairs
from multihop.pretrain.objectives.config import OBJECTIVES, ObjectiveConfig, objectives_with

NSP = ObjectiveConfig(name="mlm+nsp")
SOP = ObjectiveConfig(name="mlm+sop")
CLM = ObjectiveConfig(name="clm")
ISOLATED = ObjectiveConfig(name="clm", isolate_documents=True)
SENTENCE = 5
LONGEST = 61


def keys_of(*numbers: int) -> np.ndarray:
    return random_bits(9, np.array(numbers, np.uint64))


def close(share: float, expected: float, trials: int) -> bool:
    """Return whether a share is within five standard deviations of its expectation over so many independent trials."""
    return bool(abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / trials))


@pytest.fixture(scope="module")
def long_documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """4,000 documents of 40 sentences of 5 tokens."""
    return documents_of(tmp_path_factory.mktemp("long") / "long.arrow", [[SENTENCE] * 40] * 4000)


@pytest.mark.parametrize("seq_len", [32, 64, 128])
def test_sentence_pairs_are_laid_out_by_the_original_rules(bert_data: Path, seq_len: int) -> None:
    documents = open_dataset(bert_data).train
    index = sentence_pairs.build_index(documents, seq_len, 3, NSP)
    assert (index == sentence_pairs.build_index(documents, seq_len, 3, NSP)).all()
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


def test_next_sentences_are_laid_out_as_they_always_were(tmp_path: Path) -> None:
    sentences = [[1 + (7 * i + 3 * k) % 19 for k in range(1 + i % 9)] for i in range(50)]
    index = sentence_pairs.build_index(documents_of(tmp_path / "golden.arrow", sentences), 48, 3, NSP)
    assert index[:2].tolist() == [[0, 0, 1, 27, 0, 19, 1], [1, 0, 8, 0, 0, 1, 1]]
    assert hashlib.sha256(index.astype("<i8").tobytes()).hexdigest()[:16] == "0dc2c6429061ff71"


def test_shares_of_next_sentences(long_documents: Documents) -> None:
    index = sentence_pairs.build_index(long_documents, LONGEST + 3, 3, NSP)
    length = long_documents.lengths[0]
    # Of each document's first pair: where it is to be 2 to 5 tokens long, it holds one sentence and has no choice.
    first = index[np.unique(index[:, 0], return_index=True)[1]]
    forced = 0.1 * 4 / 60
    assert close(first[:, 6].mean(), forced + (1 - forced) * 0.5, len(first))
    others = np.bincount(index[index[:, 6] == 1, 3], minlength=4000)
    mean = others.mean()
    assert abs(others.var() / mean - 1) < 0.15 and others.max() < mean + 6 * np.sqrt(mean)  # as Poisson's
    # The documents' first pairs that are no random ones, short or not: short ones are 2 to 61 tokens, of which 2 to 5
    # hold one sentence, and 56 to 61 cannot be told from full ones.
    within = index[(index[:, 6] == 0) & (index[:, 5] < length)]
    first = within[np.unique(within[:, 0], return_index=True)[1]]
    short = first[:, 5] - first[:, 4] + first[:, 2] - first[:, 1] < LONGEST
    assert close(short.mean(), 0.1 * 50 / 60 / (1 - 0.1 * 4 / 60), len(first))


def test_shares_of_swapped_segments(long_documents: Documents) -> None:
    index = sentence_pairs.build_index(long_documents, LONGEST + 3, 3, SOP)
    assert close(index[:, 6].mean(), 0.5, len(index))
    first = index[np.unique(index[:, 0], return_index=True)[1]]
    short = first[:, 5] - first[:, 4] + first[:, 2] - first[:, 1] < LONGEST
    assert close(short.mean(), 0.1 * 54 / 60, len(first))
    # A full pair holds 13 sentences; its first segment has any number of them but all.
    lengths = np.where(index[:, 6] == 1, index[:, 5] - index[:, 4], index[:, 2] - index[:, 1])
    full = lengths[index[:, 5] - index[:, 4] + index[:, 2] - index[:, 1] == LONGEST]
    counts = np.bincount(np.minimum(full, LONGEST - full) // SENTENCE, minlength=7)[1:]  # the longer one is cut
    assert counts.min() > 0 and counts.max() < 1.4 * np.median(counts)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sentences=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=8),
    seq_len=st.integers(8, 64),
)
def test_two_consecutive_segments_in_order_or_swapped(
    sentences: list[list[int]], seq_len: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = documents_of(tmp_path_factory.getbasetemp() / "order.arrow", sentences)
    if max(map(len, sentences)) == 1:
        with pytest.raises(UserError, match="needs documents of two sentences or more, and there is none"):
            sentence_pairs.build_index(documents, seq_len, 1, SOP)
        return
    index = sentence_pairs.build_index(documents, seq_len, 1, SOP)
    assert (index[:, 0] == index[:, 3]).all()
    ordered = np.where(index[:, [6]] == 1, index[:, [4, 5, 1, 2]], index[:, [1, 2, 4, 5]])
    lengths = ordered[:, 1::2] - ordered[:, ::2]
    assert lengths.min() >= 1 and lengths.sum(1).max() <= seq_len - 3
    for document, cut in enumerate(sentences):
        ends = np.cumsum(cut)
        mine = ordered[index[:, 0] == document]
        flat = mine.ravel()
        assert (np.diff(flat) >= 0).all()  # in order, no token twice
        used = np.zeros(len(cut), bool)
        for start, stop, second, last in mine.tolist():
            begin, middle, behind = np.searchsorted(ends, [start, second, last - 1], side="right")
            used[begin : behind + 1] = True
            assert np.searchsorted(ends, stop - 1, side="right") < middle
            assert last - start == last - second + stop - start or last - second + stop - start == seq_len - 3
        # Nothing is left out but what is cut from full pairs, and a sentence that would stand alone, the last.
        uncut = (mine[:, 1::2] - mine[:, ::2]).sum(1) < seq_len - 3
        assert not uncut.all() or len(cut) == 1 or used[:-1].all()


@pytest.mark.parametrize("objective", [NSP, SOP])
def test_a_pair_becomes_cls_a_sep_b_sep(bert_data: Path, objective: ObjectiveConfig) -> None:
    data = open_dataset(bert_data)
    index = sentence_pairs.build_index(data.train, 64, 3, objective)
    rows = sentence_pairs.sample_rows(index, np.array([5, 17, 2]), 64)
    batch = sentence_pairs.collate(data.train, rows, keys_of(1, 2, 3), 64, data.manifest.tokenizer, objective)
    inputs: Any = batch.inputs
    packed = inputs["packed"]
    ids = packed.input_ids.copy()
    ids[inputs["masked_positions"]] = batch.targets
    cu_seqlens = packed.cu_seqlens.tolist()
    for row, begin, stop in zip(rows, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        (one, start_a, stop_a), (other, start_b, stop_b) = sentence_pairs.spans(data.train, row, 64, objective)
        a, b = data.train.tokens(one)[start_a:stop_a], data.train.tokens(other)[start_b:stop_b]
        assert ids[begin:stop].tolist() == [2, *a.tolist(), 3, *b.tolist(), 3]
        assert packed.token_type_ids[begin:stop].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        assert packed.positions[begin:stop].tolist() == list(range(stop - begin))
    label, task = ("is_random_next", "nsp") if objective is NSP else ("is_swapped", "sop")
    assert (inputs[label] == rows[:, 6]).all()
    assert batch.counts == {"mlm": len(batch.targets), task: 3} and batch.tokens == len(ids)


def test_one_document_is_too_few_for_next_sentences(tmp_path: Path) -> None:
    one = documents_of(tmp_path / "one.arrow", [[3, 4]])
    with pytest.raises(UserError, match="draws from another document"):
        sentence_pairs.build_index(one, 64, 1, NSP)


@pytest.mark.parametrize("objective", [CLM, ISOLATED])
@pytest.mark.parametrize("seq_len", [8, 33, 100])
def test_the_stream_is_cut_without_loss(gpt2_data: Path, seq_len: int, objective: ObjectiveConfig) -> None:
    data = open_dataset(gpt2_data)
    end = [data.manifest.tokenizer.special_ids["end"]]
    stream: list[int] = []
    for i in range(len(data.train)):
        text = data.train.tokens(i).tolist()
        stream += end + text if objective.isolate_documents else text + end
    index = clm.build_index(data.train, seq_len, 0, objective)
    count = clm.sample_count(index, seq_len)
    assert count == (len(stream) - 1) // seq_len
    rows = clm.sample_rows(index, np.arange(count), seq_len)
    batch = clm.collate(data.train, rows, keys_of(*range(count)), seq_len, data.manifest.tokenizer, objective)
    inputs: Any = batch.inputs
    assert inputs["packed"].input_ids.tolist() == stream[: count * seq_len]
    assert inputs["labels"].tolist() == batch.targets.tolist() == stream[1 : count * seq_len + 1]
    begins = set(range(0, count * seq_len, seq_len))
    if objective.isolate_documents:
        begins |= {i for i, token in enumerate(stream[: count * seq_len]) if token == end[0]}
    assert inputs["packed"].cu_seqlens.tolist() == [*sorted(begins), count * seq_len]
    assert batch.counts == {"clm": count * seq_len} and batch.tokens == count * seq_len


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=12), seq_len=st.integers(8, 40), isolate=st.booleans())
def test_samples_of_the_stream_by_their_documents(
    lengths: list[int], seq_len: int, isolate: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = documents_of(tmp_path_factory.getbasetemp() / "stream.arrow", [[length] for length in lengths])
    objective = ISOLATED if isolate else CLM
    index = clm.build_index(documents, seq_len, 0, objective)
    count = clm.sample_count(index, seq_len)
    tokenizer = tokenizer_of(np.ones(FIRST + sum(lengths), bool), GPT2)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for sample in range(count):
        rows = clm.sample_rows(index, np.array([sample]), seq_len)
        inputs: Any = clm.collate(documents, rows, keys_of(0), seq_len, tokenizer, objective).inputs
        read = [*inputs["packed"].input_ids.tolist(), int(inputs["labels"][-1])]
        spans = clm.spans(documents, rows[0], seq_len, objective)
        tokens = [int(token) for i, start, stop in spans for token in documents.tokens(i)[start:stop]]
        assert [token for token in read if token != GPT2["end"]] == tokens
        if not isolate:
            assert inputs["packed"].cu_seqlens.tolist() == [0, seq_len]
            continue
        for start, stop in zip(inputs["packed"].cu_seqlens[:-1], inputs["packed"].cu_seqlens[1:], strict=True):
            sequence, targets = inputs["packed"].input_ids[start:stop], inputs["labels"][start:stop]
            asked = targets[targets != GPT2["end"]]
            seen = sequence[sequence != GPT2["end"]]
            assert len(set(document_of[np.concatenate([seen, asked]) - FIRST].tolist())) == 1
            assert (sequence[1:] != GPT2["end"]).all() and (targets[:-1] != GPT2["end"]).all()
            assert inputs["packed"].positions[start:stop].tolist() == list(range(stop - start))


def test_every_objective_declares_its_needs() -> None:
    names = get_args(ObjectiveConfig.model_fields["name"].annotation)
    assert set(names) == OBJECTIVES.keys() == {name for family in FAMILIES.values() for name in family.objectives}
    keys = ObjectiveConfig.model_fields.keys() - {"name"}
    assert all(needs.keys <= keys for needs in OBJECTIVES.values())
    assert all(objectives_with(key) for key in keys)
    for name, needs in OBJECTIVES.items():
        assert any(tokens.keys() == needs.special_tokens for tokens in SPECIAL_TOKENS.values()), name
