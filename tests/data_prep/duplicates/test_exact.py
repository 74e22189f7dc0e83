"""Exact copies are found whatever the splits and hash ranges are; the sample does not depend on the order."""

import random
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multihop.data_prep.duplicates.exact import (
    FindCopies,
    SortHashes,
    find_copies,
    hash_ranges,
    rows_by_split,
    sort_hashes,
)
from multihop.data_prep.pipeline.train_tokenizer import FindCandidates, find_candidates, largest_id, merge_candidates
from multihop.data_prep.stages.documents import SCHEMA, Selection
from multihop.data_prep.stages.outputs import write_batches

Document = tuple[int, int, int]
"""The two words of a document's hash, and its number of bytes."""
words = st.one_of(st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
sizes = st.sampled_from([1, 2]) | st.integers(1, 50)
corpora = st.lists(st.lists(st.tuples(words, words, sizes), max_size=12), min_size=1, max_size=6)


def write_split(path: Path, documents: list[Document]) -> str:
    """Write a split as `read_split` would, in two batches; returns the path."""

    def batch(rows: list[Document]) -> pa.RecordBatch:
        first, second, size = zip(*rows, strict=True) if rows else ((), (), ())
        columns = [first, second, size, [0] * len(rows), [""] * len(rows)]
        arrays = [pa.array(column, kind.type) for column, kind in zip(columns, SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    half = len(documents) // 2
    write_batches(path, SCHEMA, iter([batch(documents[:half]), batch(documents[half:])]), "lz4")
    return str(path)


@settings(max_examples=60)
@given(corpus=corpora, range_documents=st.integers(1, 80))
def test_all_but_the_first_of_equal_documents_are_found(corpus: list[list[Document]], range_documents: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        paths = [write_split(folder / f"{number}.arrow", split) for number, split in enumerate(corpus)]
        splits = [Selection(path, "", 0, np.arange(2, len(corpus[number]), 5)) for number, path in enumerate(paths)]
        runs = [sort_hashes(SortHashes(f"run{number}", name, split)).path for number, split in enumerate(splits)]
        ranges = list(hash_ranges(sum(map(len, corpus)), range_documents))
        found = [find_copies(FindCopies(f"c{low:x}", name, tuple(runs), low, high)) for low, high in ranges]
        dropped = rows_by_split([output.path for output in found], len(corpus))

    seen: set[tuple[int, int]] = set()
    expected: list[list[int]] = [[] for _ in corpus]
    for split, documents in enumerate(corpus):
        for row, (first, _, size) in enumerate(documents):
            if row % 5 == 2:  # dropped before
                continue
            if (first, size) in seen:
                expected[split].append(row)
            seen.add((first, size))
    assert [rows.tolist() for rows in dropped] == expected
    assert sum(output.metadata["copies"] for output in found) == sum(map(len, expected))


@pytest.mark.parametrize("number", [1, 2, 3, 7, 1000])
def test_ranges_cover_every_hash_once(number: int) -> None:
    ranges = list(hash_ranges(number, 1))
    assert len(ranges) == number and ranges[0][0] == 0 and ranges[-1][1] == 2**64 - 1
    assert all(one[1] + 1 == other[0] for one, other in pairwise(ranges))


@settings(max_examples=60)
@given(corpus=corpora, sample_bytes=st.integers(0, 400), order=st.randoms(use_true_random=False))
def test_the_sample_is_the_smallest_of_all_in_any_order(
    corpus: list[list[Document]], sample_bytes: int, order: random.Random
) -> None:
    corpus = [list({document[0]: document for document in split}.values()) for split in corpus]
    with TemporaryDirectory() as name:
        splits = []
        for number, documents in enumerate(corpus):
            path = write_split(Path(name) / f"{number}.arrow", documents)
            splits.append(Selection(path, "", len(documents), np.arange(0, len(documents), 3)))
        found = [find_candidates(FindCandidates(split, 0.3, sample_bytes)) for split in splits]
        order.shuffle(found)
        merged = merge_candidates(found, sample_bytes)

    kept = [document for split in corpus for row, document in enumerate(split) if row % 3]
    train = sorted((first, size) for first, second, size in kept if second >= int(0.3 * 2**64))
    assert merged.kept == len(kept) and merged.held == len(kept) - len(train)
    total, expected = 0, []
    for first, size in train:
        total += size
        if total > sample_bytes and expected:
            break
        expected.append(first)
    if len({first for first, _ in train}) == len(train) > 0:  # documents of one id are in the order of arrival
        assert largest_id(merged, sample_bytes) == expected[-1]
