"""Rows of pairs of any texts, compared with a simple way to make them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_pairs import TOKENS, pair

from multihop.data_prep.dataset.shards import Documents, count_target_tokens, shard_schema, write_shard
from multihop.data_prep.pipeline.encode import encode_pairs
from multihop.data_prep.rules.pairs import clean_side, join_sides
from multihop.data_prep.stages.documents import SCHEMA
from multihop.data_prep.tokenizers.sentence_piece import SentencePiece
from multihop.data_prep.tokenizers.training import train

# A soft hyphen and a zero-width space have no token: SentencePiece's normalization removes them.
SIDES = st.text(st.sampled_from("abdefgiklmnou .\u00e9\u4e2d\u00ad\u200b"), max_size=20).map(clean_side)


@pytest.fixture(scope="module")
def tokenizers() -> list[SentencePiece]:
    sides = list(zip(*(pair(number) for number in range(150)), strict=True))
    return [SentencePiece(train(side, TOKENS.model_copy(update={"vocab_size": 80}))) for side in sides]


def rows_of(pairs: list[tuple[str, str]]) -> pa.RecordBatch:
    texts = [join_sides(*each) for each in pairs]
    sizes = [len(text.encode()) for text in texts]
    columns = [list(range(len(texts))), [0] * len(texts), sizes, [0] * len(texts), texts]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(st.lists(st.tuples(SIDES, SIDES), max_size=8), min_size=1, max_size=3), joint=st.booleans())
def test_rows_are_the_tokens_of_both_sides_and_only_whole_pairs_have_one(
    tokenizers: list[SentencePiece],
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[str, str]]],
    joint: bool,
) -> None:
    first, second = tokenizers[0], tokenizers[0 if joint else 1]
    schema = shard_schema("uint16")
    encoded = [encode_pairs(rows_of(pairs), first, second, schema) for pairs in batches]
    expected = [
        (number, source, target)
        for pairs in batches
        for number, each in enumerate(pairs)
        if len(source := first.encode([each[0]])[0]) and len(target := second.encode([each[1]])[0])
    ]
    assert [bytes_ for _, bytes_ in encoded] == [
        sum(len(side.encode()) for each in pairs for side in each) for pairs in batches
    ]
    if not expected:
        assert not any(batch.num_rows for batch, _ in encoded)
        return
    path: Path = tmp_path_factory.mktemp("shard") / "train-00000.arrow"
    write_shard(path, [batch for batch, _ in encoded])
    documents = Documents([path])
    assert documents.ids.tolist() == [number for number, _, _ in expected]
    assert documents.source_lengths.tolist() == [len(source) for _, source, _ in expected]
    for i, (_, source, target) in enumerate(expected):
        assert documents.tokens(i).tolist() == [*source, *target]
        assert documents.sentence_ends(i).tolist() == [len(source), len(source) + len(target)]
    targets = np.concatenate([target for _, _, target in expected])
    assert count_target_tokens((str(path), 80)).tolist() == np.bincount(targets, minlength=80).tolist()
