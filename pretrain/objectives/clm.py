"""GPT's objective: the next piece. Documents are joined, an end piece behind each, and the stream is cut."""

import numpy as np
from numpy.typing import NDArray

from data_prep.manifest import TokenizerInfo
from data_prep.shards import Documents
from pretrain.keyed import UInt64
from pretrain.objectives.batch import Batch

DOCUMENT_COLUMNS = [0]


def build_index(documents: Documents, seq_len: int, key: int) -> NDArray[np.int64]:
    """int64 (documents + 1,): where each document starts in the stream, and the stream's length."""
    return np.concatenate([[0], np.cumsum(documents.lengths + 1)]).astype(np.int64)


def sample_count(index: NDArray[np.int64], seq_len: int) -> int:
    """How many samples the stream is cut into; the last piece of each is the first input of the next one."""
    return max(0, (int(index[-1]) - 1) // seq_len)


def look_up(index: NDArray[np.int64], samples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """int64 (B, 2): the document in which each sample starts, and where in it."""
    at = samples * seq_len
    documents = np.searchsorted(index, at, side="right") - 1
    return np.stack([documents, at - index[documents]], axis=1)


def spans(documents: Documents, row: NDArray[np.int64], seq_len: int) -> list[tuple[int, int, int]]:
    """(document, start, stop) of all that a sample holds; its targets reach one piece further than its inputs."""
    document, start = row.tolist()
    left, found = seq_len + 1, []
    while left > 0:
        stop = min(start + left, len(documents.tokens(document)))
        found.append((document, start, stop))
        left -= stop - start + 1  # the end piece
        document, start = document + 1, 0
    return found


def assemble(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    mask_rate: float,
) -> Batch:
    """Inputs and, one piece further, targets: pieces i * seq_len to (i + 1) * seq_len of the stream for sample i."""
    text = np.full((len(rows), seq_len + 1), tokenizer.special_ids["end"], np.int64)
    for line, row in enumerate(rows):
        at = 0
        for document, start, stop in spans(documents, row, seq_len):
            text[line, at : at + stop - start] = documents.tokens(document)[start:stop]
            at += stop - start + 1  # the end piece is there already
    next_ids = np.ascontiguousarray(text[:, 1:])
    return Batch(
        inputs={
            "input_ids": np.ascontiguousarray(text[:, :-1]),
            "lengths": np.full(len(text), seq_len, np.int64),
            "next_ids": next_ids,
        },
        targets=next_ids.ravel(),
        counts={"token": next_ids.size},
        tokens=next_ids.size,
    )
