"""Masked language modeling on full sentences (Liu et al. 2019, section 4.2, FULL-SENTENCES).

A sample takes sentence after sentence, across documents, until the next one does not fit; a sentence longer than a
sample is split. Every token is in exactly one sample. A sample is a range of the stream `d1 gap d2 gap …`, where the
gap is the extra [SEP] between two documents or, with isolated documents, [SEP] and the next document's [CLS].
"""

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.masking import mask_tokens
from multihop.pretrain.packed_tokens import cumulative_lengths, pack, positions_in

DOCUMENT_COLUMNS = [0, 2]
"""The columns of the index that hold document numbers."""

_BLOCK = 2**16
"""Documents that are packed at a time, to bound the memory; the samples do not depend on it."""


def build_index(documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """All samples of a set of documents: int64 (samples, 4), of (first document, start in it, last document, stop in
    it)."""
    return full_sentences(documents, seq_len, gap=1 + int(objective.isolate_documents))


def full_sentences(documents: Documents, seq_len: int, gap: int, sentence_gap: int = 0) -> NDArray[np.int64]:
    """The rows of `build_index` for samples of at most `seq_len` tokens, of which two are special ones at the ends.

    Args:
        gap: Number of special tokens between two documents.
        sentence_gap: Number of special tokens between two sentences, or parts of a long one, of any documents.
    """
    samples: list[NDArray[np.int64]] = [np.empty((0, 4), np.int64)]
    document = start = 0
    while document < len(documents):
        stop = min(document + max(_BLOCK, seq_len), len(documents))
        rows = _cut(documents, document, start, stop, seq_len - 2, gap, sentence_gap)
        if stop < len(documents):  # the last sample may continue in the next block
            rows, (document, start) = rows[:-1], rows[-1, :2].tolist()
        else:
            document = stop
        samples.append(rows)
    return np.concatenate(samples)


def _cut(
    documents: Documents, first: int, start: int, stop: int, room: int, gap: int, sentence_gap: int
) -> NDArray[np.int64]:
    """The samples of the documents first to stop - 1, from `start` in the first one, of `room` text tokens each."""
    counts, sentence_ends = documents.sentences_in(first, stop)
    ends = sentence_ends.astype(np.int64)
    lengths = ends[np.cumsum(counts) - 1]
    document = np.repeat(np.arange(first, stop), counts)
    is_left = (document > first) | (ends > start)
    document, ends = document[is_left], ends[is_left]
    # A sentence longer than a sample always begins a sample, so its splits are known in advance.
    begins = np.concatenate([[start], ends[:-1]])
    begins[1:][np.diff(document) > 0] = 0
    parts = np.maximum(1, -(-(ends - begins) // room))
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    document, last_end = np.repeat(document, parts), np.repeat(ends, parts)
    begins = np.repeat(begins, parts) + number * room
    ends = np.minimum(begins + room, last_end)

    offsets = np.concatenate([[0], np.cumsum(lengths + gap)])[document - first]
    offsets = offsets + sentence_gap * np.arange(len(document))
    next_first = np.searchsorted(ends + offsets, begins + offsets + room, side="right")
    firsts, at = [], 0
    while at < len(next_first):
        firsts.append(at)
        at = next_first.item(at)
    chosen = np.array(firsts)
    last = np.append(chosen[1:], len(next_first)) - 1
    return np.stack([document[chosen], begins[chosen], document[last], ends[last]], axis=1)


def sample_count(index: NDArray[np.int64], seq_len: int) -> int:
    """The number of samples in an index."""
    return len(index)


def sample_rows(index: NDArray[np.int64], samples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """int64 (B, 4): the samples' rows of the index."""
    return index[samples]


def spans(
    documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
) -> list[tuple[int, int, int]]:
    """(document, start, stop) of each document's part of a sample."""
    first, start, last, stop = row.tolist()
    if first == last:
        return [(first, start, stop)]
    between = [(document, 0, len(documents.tokens(document))) for document in range(first + 1, last)]
    return [(first, start, len(documents.tokens(first))), *between, (last, 0, stop)]


def collate(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    objective: ObjectiveConfig,
) -> Batch:
    """The model's masked inputs for some samples, [CLS] d1 [SEP] d2 [SEP] each.

    Isolated documents are separate sequences: [CLS] d1 [SEP], [CLS] d2 [SEP].

    Args:
        rows: int64 (B, 4), rows of the index.
        keys: uint64 (B,), the key of each sample's mask.
    """
    special = tokenizer.special_ids
    texts: list[NDArray[np.int64]] = []
    counts: list[int] = []
    for row in rows:
        parts = spans(documents, row, seq_len, objective)
        counts.append(len(parts))
        texts += [documents.tokens(document)[start:stop] for document, start, stop in parts]
    begins_sample = np.zeros(len(texts), bool)
    begins_sample[np.cumsum([0, *counts[:-1]])] = True
    has_cls = begins_sample | objective.isolate_documents
    lengths = np.array([len(text) for text in texts]) + has_cls + 1
    stops = np.cumsum(lengths)
    input_ids = np.full(stops[-1], special["cls"], np.int64)
    input_ids[stops - 1] = special["sep"]
    for text, stop in zip(texts, stops.tolist(), strict=True):
        input_ids[stop - 1 - len(text) : stop - 1] = text

    cu_samples = cumulative_lengths(np.add.reduceat(lengths, np.flatnonzero(begins_sample)))
    cu_seqlens = cumulative_lengths(lengths) if objective.isolate_documents else cu_samples
    sequence_keys = np.repeat(keys, counts) if objective.isolate_documents else keys
    masked, masked_positions, labels = mask_tokens(
        input_ids, cu_seqlens, positions_in(cu_samples), sequence_keys, objective, tokenizer
    )
    return Batch(
        inputs={"packed": pack(masked, cu_seqlens), "masked_positions": masked_positions, "labels": labels},
        targets=labels,
        counts={"mlm": len(labels)},
        tokens=len(masked),
    )
