"""The samples of objectives that read pairs: each pair is one, sorted by length, so that batches by tokens can be cut.

A row of the index has the number of the pair's document, and then the numbers of tokens of the sequences that are made
of it: the longest of them is the pair's length.
"""

import logging

import numpy as np
from numpy.typing import NDArray

DOCUMENT_COLUMNS = [0]

log = logging.getLogger("multihop")


def index_by_length(lengths: list[NDArray[np.int64]], seq_len: int, what: str) -> NDArray[np.int64]:
    """int64 (pairs, 1 + sequences): document and lengths, sorted by the longest; pairs longer than `seq_len` are left
    out, with a warning.

    Args:
        lengths: int64 (pairs,), tokens of each sequence of every pair, special tokens included.
        what: the pairs that are too long have, for the warning: "a side".
    """
    longest = np.max(lengths, axis=0) if len(lengths[0]) else lengths[0]
    order = np.argsort(longest, kind="stable")
    order = order[: np.searchsorted(longest[order], seq_len, side="right")]
    if left_out := len(longest) - len(order):
        log.warning(
            "%d of %d pairs have %s longer than phases[].seq_len=%d tokens and are left out; raise it to use them",
            left_out,
            len(longest),
            what,
            seq_len,
        )
    return np.stack([order, *(each[order] for each in lengths)], axis=1)


def sample_count(index: NDArray[np.int64], seq_len: int) -> int:
    """The number of pairs in an index."""
    return len(index)


def sample_rows(index: NDArray[np.int64], samples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """int64 (B, columns): the samples' rows of the index."""
    return index[samples]
