"""RoBERTa's full sentences, across documents or within them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_shards import FIRST, documents_of, tokenizer_of

from multihop.common.counter_rng import random_bits
from multihop.data_prep.dataset.shards import Documents
from multihop.pretrain.objectives import mlm
from multihop.pretrain.objectives.config import ObjectiveConfig

Span = tuple[int, int, int]


def objective_of(isolate: bool, **rules: Any) -> ObjectiveConfig:
    return ObjectiveConfig(name="mlm", isolate_documents=isolate, **rules)


def by_hand(sentences: list[list[int]], seq_len: int, isolate: bool) -> list[list[Span]]:
    """Return the samples, taken sentence by sentence as the paper describes."""
    samples: list[list[Span]] = []
    room = 0
    for document, lengths in enumerate(sentences):
        at = 0
        for length in lengths:
            new_document = bool(samples) and samples[-1][-1][0] != document
            needed = length + (2 if isolate else 1) * new_document
            if samples and needed <= room:
                parts = samples[-1]
                parts[-1:] = [*parts[-1:], (document, at, at)] if new_document else parts[-1:]
                parts[-1] = (document, parts[-1][1], at + length)
                room -= needed
                at += length
                continue
            stop = at + length
            while at < stop:
                token = min(seq_len - 2, stop - at)
                samples.append([(document, at, at + token)])
                room = seq_len - 2 - token
                at += token
    return samples


def laid_out(documents: Documents, seq_len: int, objective: ObjectiveConfig) -> list[list[Span]]:
    index = mlm.build_index(documents, seq_len, 0, objective)
    rows = mlm.sample_rows(index, np.arange(mlm.sample_count(index, seq_len)), seq_len)
    return [mlm.spans(documents, row, seq_len, objective) for row in rows]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sentences=st.lists(
        st.lists(st.one_of(st.integers(1, 12), st.integers(1, 90)), min_size=1, max_size=8), min_size=1, max_size=10
    ),
    seq_len=st.integers(8, 40),
    isolate=st.booleans(),
    masking=st.sampled_from(["tokens", "words", "spans", "ngrams"]),
)
def test_whole_sentences_up_to_the_length_and_every_token_once(
    sentences: list[list[int]],
    seq_len: int,
    isolate: bool,
    masking: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    documents = documents_of(tmp_path_factory.getbasetemp() / "full.arrow", sentences)
    objective = objective_of(isolate, masking=masking)
    samples = laid_out(documents, seq_len, objective)
    assert samples == by_hand(sentences, seq_len, isolate)
    used = np.concatenate([documents.tokens(i)[start:stop] for parts in samples for i, start, stop in parts])
    assert used.tolist() == list(range(FIRST, FIRST + sum(map(sum, sentences))))

    tokenizer = tokenizer_of(np.arange(FIRST + len(used)) % 3 > 0)
    rows = mlm.build_index(documents, seq_len, 0, objective)
    keys = random_bits(4, np.arange(len(rows), dtype=np.uint64))
    batch = mlm.collate(documents, rows, keys, seq_len, tokenizer, objective)
    inputs: Any = batch.inputs
    packed = inputs["packed"]
    ids = packed.input_ids.copy()
    ids[inputs["masked_positions"]] = batch.targets
    texts = [[documents.tokens(i)[start:stop].tolist() for i, start, stop in parts] for parts in samples]
    if isolate:
        expected = [[2, *text, 3] for sample in texts for text in sample]
        assert all(sum(len(text) + 2 for text in sample) <= seq_len for sample in texts)
    else:
        expected = [[2, *(token for text in sample for token in [*text, 3])] for sample in texts]
        assert max(map(len, expected)) <= seq_len
    cu_seqlens = packed.cu_seqlens.tolist()
    assert [ids[start:stop].tolist() for start, stop in pairwise(cu_seqlens)] == expected
    assert packed.positions.tolist() == [place for sequence in expected for place in range(len(sequence))]
    assert batch.tokens == len(ids) and batch.counts == {"mlm": len(batch.targets)}
    counts = np.diff(np.searchsorted(inputs["masked_positions"], cu_seqlens))
    for count, sequence in zip(counts.tolist(), expected, strict=True):
        asked = min(max(1, round(0.15 * len(sequence))), sum(token >= FIRST for token in sequence))
        assert count == asked if masking == "tokens" else count <= asked
    # A sample's masks depend on no other sample of its batch.
    alone: Any = mlm.collate(documents, rows[-1:], keys[-1:], seq_len, tokenizer, objective).inputs
    last = alone["packed"].input_ids
    assert (last == packed.input_ids[-len(last) :]).all()


def test_isolated_documents_of_a_sample_are_masked_each_in_its_own_way(tmp_path: Path) -> None:
    documents = documents_of(tmp_path / "same.arrow", [[30]] * 400)
    objective, tokenizer = objective_of(True), tokenizer_of(np.ones(FIRST + 12000, bool))
    rows = mlm.build_index(documents, 64, 0, objective)
    assert len(rows) == 200
    keys = random_bits(4, np.arange(len(rows), dtype=np.uint64))
    inputs: Any = mlm.collate(documents, rows, keys, 64, tokenizer, objective).inputs
    places = (inputs["masked_positions"] % 32).reshape(400, 5)
    assert len({tuple(row) for row in places.tolist()}) > 395


@pytest.mark.parametrize("isolate", [False, True])
def test_many_documents_are_laid_out_as_few(isolate: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sentences = [rng.integers(1, 30, rng.integers(1, 4)).tolist() for _ in range(140_000)]
    documents = documents_of(tmp_path / "many.arrow", sentences)
    assert laid_out(documents, 64, objective_of(isolate)) == by_hand(sentences, 64, isolate)
