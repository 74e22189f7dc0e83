"""GPT's objective: the next piece. Documents are joined, an end piece behind each, and the stream is cut."""

import numpy as np
from numpy.typing import NDArray

from data_prep.manifest import TokenizerInfo
from data_prep.shards import Documents
from pretrain.keyed import UInt64
from pretrain.objectives.batch import Batch


def build_index(documents: Documents, seq_len: int, key: int) -> NDArray[np.int64]:
    """int64 (documents + 1,): where each document starts in the stream, and the stream's length."""
    return np.concatenate([[0], np.cumsum(documents.lengths + 1)]).astype(np.int64)


def sample_count(index: NDArray[np.int64], seq_len: int) -> int:
    """How many samples the stream is cut into; the last piece of each is the first input of the next one."""
    return max(0, (int(index[-1]) - 1) // seq_len)


def assemble(
    documents: Documents,
    index: NDArray[np.int64],
    samples: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    mask_rate: float,
) -> Batch:
    """Inputs and, one piece further, targets: pieces i * seq_len to (i + 1) * seq_len of the stream for sample i."""
    text = np.stack([_cut(documents, index, int(i) * seq_len, seq_len + 1, tokenizer) for i in samples])
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


def _cut(
    documents: Documents, starts: NDArray[np.int64], at: int, length: int, tokenizer: TokenizerInfo
) -> NDArray[np.int64]:
    piece = np.full(length, tokenizer.special_ids["end"], np.int64)
    document = int(np.searchsorted(starts, at, side="right")) - 1
    filled = 0
    while filled < length:
        offset = at + filled - int(starts[document])
        text = documents.tokens(document)[offset : offset + length - filled]
        piece[filled : filled + len(text)] = text
        filled += len(text) + 1  # the end piece is there already
        document += 1
    return piece
