"""What depends on a document's content only: its id, whether it is held out, and whether it is a copy."""

import hashlib

import numpy as np


def content_hash(text: str) -> tuple[int, int]:
    """The first two 8-byte words of the SHA-256 of a cleaned document.

    The first is the document's id; the second decides whether it is held out, so that the two are independent. A
    fragment of a document has the document's second word: both are on the same side of the split.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]), int.from_bytes(digest[8:16])


def first_copies(first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """bool (n,): true for the first of equal documents, in the order of sources, file names and places.

    Documents of the same id and size count as equal. With 10^10 documents of a thousand different sizes, one is dropped
    by mistake with a probability of about 1/400.

    Args:
        first: uint64 (n,), ids, in the order of the input.
        size: uint32 (n,), bytes.
    """
    order = np.lexsort((size, first))  # stable: copies stay in the order of the input
    same = (first[order[1:]] == first[order[:-1]]) & (size[order[1:]] == size[order[:-1]])
    keep = np.ones(len(first), dtype=bool)
    keep[order[1:][same]] = False
    return keep


def held_out(second: np.ndarray, fraction: float) -> np.ndarray:
    """bool (n,): which documents are held out; `second` is uint64 (n,), of `content_hash`."""
    return second < np.uint64(int(fraction * 2**64))
