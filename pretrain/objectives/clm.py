"""Causal language modeling: the next token. Documents are joined by end tokens, and the stream is cut into samples.

Every document is followed by its end token: `d1 end d2 end`. With isolated documents the end token precedes its
document instead, `end d1 end d2`, and a sequence begins at each: a document's first token is predicted from the end
token alone.
"""

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.packed_tokens import pack

DOCUMENT_COLUMNS = [0]


def build_index(documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """int64 (documents + 1,): the position of each document's start in the stream, end tokens included, and the
    stream's length."""
    return np.concatenate([[0], np.cumsum(documents.lengths + 1)]).astype(np.int64)


def sample_count(index: NDArray[np.int64], seq_len: int) -> int:
    """The number of samples in the stream; the last target of each is the first input of the next one."""
    return max(0, (int(index[-1]) - 1) // seq_len)


def sample_rows(index: NDArray[np.int64], samples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """int64 (B, 2): the document in which each sample starts, and the offset in that document with its end token."""
    at = samples * seq_len
    documents = np.searchsorted(index, at, side="right") - 1
    return np.stack([documents, at - index[documents]], axis=1)


def spans(
    documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
) -> list[tuple[int, int, int]]:
    """(document, start, stop) of each span in a sample, which has one more token than the model's inputs."""
    return [(document, start, stop) for document, start, stop, _ in _parts(documents, row, seq_len, objective)]


def _parts(
    documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
) -> list[tuple[int, int, int, int]]:
    """(document, start, stop, offset in the sample) of each span; the gaps between spans are end tokens."""
    before = int(objective.isolate_documents)
    document, offset = row.tolist()
    at, spans_in_sample = 0, []
    while at <= seq_len:
        length = len(documents.tokens(document))
        start = max(0, offset - before)
        at += start + before - offset  # the end token, where it precedes the document and is in the sample
        stop = min(start + seq_len + 1 - at, length)
        spans_in_sample.append((document, start, stop, at))
        at += stop - start + 1 - before
        document, offset = document + 1, 0
    return spans_in_sample


def collate(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    objective: ObjectiveConfig,
) -> Batch:
    """Inputs, and targets shifted by one: sample i has tokens i * seq_len to (i + 1) * seq_len of the stream."""
    end = tokenizer.special_ids["end"]
    text = np.full((len(rows), seq_len + 1), end, np.int64)
    for sample, row in enumerate(rows):
        for document, start, stop, at in _parts(documents, row, seq_len, objective):
            text[sample, at : at + stop - start] = documents.tokens(document)[start:stop]
    input_ids, labels = text[:, :-1].ravel(), text[:, 1:].ravel()
    begins = np.zeros(len(input_ids), bool)
    begins[::seq_len] = True
    if objective.isolate_documents:
        begins |= input_ids == end
    cu_seqlens = np.append(np.flatnonzero(begins), len(input_ids))
    return Batch(
        inputs={"packed": pack(input_ids, cu_seqlens), "labels": labels},
        targets=labels,
        counts={"clm": labels.size},
        tokens=labels.size,
    )
