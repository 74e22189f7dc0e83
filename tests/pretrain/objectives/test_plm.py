"""Permutation language modeling: samples, predicted spans, factorization orders."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_shards import BERT, FIRST, documents_of, tokenizer_of

from multihop.common.counter_rng import random_bits
from multihop.pretrain.objectives import mlm, plm
from multihop.pretrain.objectives.config import ObjectiveConfig

STARTS = np.ones(FIRST + 5000, bool)


def batch_of(folder: Path, sentences: list[list[int]], seq_len: int, isolate: bool = False, **rules: Any) -> Any:
    """Return all samples of some documents as one batch."""
    documents = documents_of(folder / "plm.arrow", sentences)
    objective = ObjectiveConfig(name="plm", isolate_documents=isolate, **rules)
    rows = plm.build_index(documents, seq_len, 0, objective)
    keys = random_bits(3, np.arange(len(rows), dtype=np.uint64))
    return plm.collate(documents, rows, keys, seq_len, tokenizer_of(STARTS), objective)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    sentences=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=8),
    seq_len=st.integers(8, 40),
    isolate=st.booleans(),
)
def test_the_text_is_that_of_mlm_and_every_prediction_has_something_to_see(
    sentences: list[list[int]], seq_len: int, isolate: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if max(sum(map(sum, sentences)) if not isolate else max(map(sum, sentences)), 0) < 2:
        return
    batch = batch_of(tmp_path_factory.getbasetemp(), sentences, seq_len, isolate)
    packed, order, at = batch.inputs["packed"], batch.inputs["factorization_order"], batch.inputs["masked_positions"]
    special = np.isin(packed.input_ids, list(BERT.values()))
    assert packed.input_ids[~special].tolist() == list(range(FIRST, FIRST + sum(map(sum, sentences))))
    assert packed.max_seqlen <= seq_len
    assert (batch.inputs["labels"] == packed.input_ids[at]).all() and not special[at].any()
    in_order = np.isin(np.arange(len(order)), at) | special
    assert ((order >= 0) == in_order).all()
    for start, stop in zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True):
        ids, types, mine = packed.input_ids[start:stop], packed.token_type_ids[start:stop], order[start:stop]
        assert ids[-1] == BERT["cls"] and (ids[:-1] != BERT["cls"]).all() and ids[-2] == BERT["sep"]
        assert types[-1] == 2 and (types[:-1] != 2).all()
        assert (np.diff(types[:-1])[ids[:-2] != BERT["sep"]] == 0).all()
        assert (np.diff(types[:-1])[ids[:-2] == BERT["sep"]] > 0).all()
        assert sorted(mine[mine >= 0]) == list(range((mine >= 0).sum()))
        predicted = ((at >= start) & (at < stop)).sum()
        ordinary = (~special[start:stop]).sum()
        assert predicted == min(max(1, round((stop - start) / 6)), ordinary - 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    sentences=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=8),
    mem_len=st.integers(1, 60),
    isolate=st.booleans(),
)
def test_a_memory_is_the_text_before_a_sample_and_changes_nothing_else(
    sentences: list[list[int]], mem_len: int, isolate: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if max(map(sum, sentences)) < 2:
        return
    folder = tmp_path_factory.getbasetemp()
    bare, batch = (batch_of(folder, sentences, 20, isolate, mem_len=number) for number in (0, mem_len))
    inputs, expected, is_memory = batch.inputs, bare.inputs, batch.inputs["is_memory"]
    for name in ("input_ids", "token_type_ids"):
        assert (getattr(inputs["packed"], name)[~is_memory] == getattr(expected["packed"], name)).all()
    assert (inputs["factorization_order"][~is_memory] == expected["factorization_order"]).all()
    assert (inputs["factorization_order"][is_memory] == -1).all()
    assert (np.flatnonzero(~is_memory)[expected["masked_positions"]] == inputs["masked_positions"]).all()
    assert batch.tokens == bare.tokens and (batch.targets == bare.targets).all()
    documents = np.cumsum([0, *map(sum, sentences)]) + FIRST
    bounds = inputs["packed"].cu_seqlens
    for start, stop in pairwise(bounds):
        ids, remembered = inputs["packed"].input_ids[start:stop], is_memory[start:stop]
        count = remembered.sum()
        assert remembered[:count].all()
        first = ids[count]  # ids ascend through all documents
        begins_document = documents[np.searchsorted(documents, first, side="right") - 1]
        known = first - begins_document
        # A sample's later sequences begin with a document.
        assert count == min(mem_len, known)
        assert ids[:count].tolist() == list(range(first - count, first))
        assert (inputs["packed"].token_type_ids[start : start + count] == 0).all()


def test_spans_have_one_to_five_tokens_with_the_published_shares(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [[4800]], 4802, mask_rate=0.02)
    at = batch.inputs["masked_positions"]
    lengths = np.diff(np.flatnonzero(np.diff(at, prepend=-9, append=10**6) > 1))
    shares = np.bincount(lengths, minlength=6)[1:6] / len(lengths)
    assert len(at) == 96 and lengths.sum() == 96
    assert np.abs(shares - plm.SPAN_SHARES).max() < 0.25


def test_orders_are_uniform_and_differ_by_key(tmp_path: Path) -> None:
    documents = documents_of(tmp_path / "plm.arrow", [[14]])
    objective = ObjectiveConfig(name="plm", mask_rate=0.2)
    rows = np.repeat(plm.build_index(documents, 16, 0, objective), 6000, axis=0)
    keys = random_bits(5, np.arange(len(rows), dtype=np.uint64))
    inputs: Any = plm.collate(documents, rows, keys, 16, tokenizer_of(STARTS), objective).inputs
    order = inputs["factorization_order"].reshape(6000, 16)
    # 3 predicted tokens, [SEP] and [CLS]: each of the 5 is as often at each place.
    for column in (14, 15):
        counts = np.bincount(order[:, column], minlength=5)
        assert np.abs(counts - 1200).max() < 5 * np.sqrt(6000 * 0.2 * 0.8)
    chosen = np.bincount(inputs["masked_positions"] % 16, minlength=16)
    assert chosen[14:].sum() == 0 and chosen[:14].min() > 0.5 * chosen[:14].max()


def test_an_order_depends_on_its_key_alone(tmp_path: Path) -> None:
    documents = documents_of(tmp_path / "plm.arrow", [[30, 20], [25], [40]])
    objective = ObjectiveConfig(name="plm")
    rows = plm.build_index(documents, 32, 0, objective)
    keys = random_bits(7, np.arange(len(rows), dtype=np.uint64))
    together: Any = plm.collate(documents, rows, keys, 32, tokenizer_of(STARTS), objective).inputs
    bounds = together["packed"].cu_seqlens
    for number in range(len(rows)):
        part = slice(number, number + 1)
        alone: Any = plm.collate(documents, rows[part], keys[part], 32, tokenizer_of(STARTS), objective).inputs
        order = together["factorization_order"][bounds[number] : bounds[number + 1]]
        assert alone["factorization_order"].tolist() == order.tolist()


def test_a_permutation_of_one_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"objective\.name=plm predicts some tokens of a permutation from others"):
        batch_of(tmp_path, [[1], [1], [1]], 8, isolate=True)
    assert batch_of(tmp_path, [[1], [1], [1]], 8).counts["plm"] == 1
    isolated = batch_of(tmp_path, [[1], [2], [1]], 8, isolate=True)
    assert isolated.counts["plm"] == 1  # documents of one token are only read


def test_a_sixth_is_predicted_unless_it_is_set() -> None:
    assert ObjectiveConfig(name="plm").mask_rate == 1 / 6
    assert ObjectiveConfig(name="plm", mask_rate=0.15).mask_rate == 0.15
    assert ObjectiveConfig(name="mlm").mask_rate == 0.15
    assert mlm.DOCUMENT_COLUMNS == plm.DOCUMENT_COLUMNS
