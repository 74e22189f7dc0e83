"""Packed sequences of any lengths, without padding: the format that objectives produce and models read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = TypeVar("Array")
CLS_TYPE = 2
"""The token type of a cls token that ends a sequence."""


@dataclass(frozen=True)
class PackedTokens(Generic[Array]):
    """N tokens of S sequences in one flat array: a NumPy array from an objective, or a tensor for a model.

    Attention stays within a sequence.
    """

    input_ids: Array
    """int64 (N,)."""
    positions: Array
    """int64 (N,): each token's position in its sequence, from 0."""
    cu_seqlens: Array
    """int64 (S + 1,): cumulative sequence lengths, from 0 to N."""
    max_seqlen: int
    """The length of the longest sequence."""
    token_type_ids: Array | None = None
    """int64 (N,): 0 or 1, BERT's segments, and 2 for a cls token at the end; None: all 0."""


def cumulative_lengths(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 (S + 1,): the `cu_seqlens` of S sequences."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def positions_in(cu_seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 (N,): each token's position in its sequence."""
    return np.arange(cu_seqlens[-1], dtype=np.int64) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))


def pack(
    input_ids: NDArray[np.int64], cu_seqlens: NDArray[np.int64], token_type_ids: NDArray[np.int64] | None = None
) -> PackedTokens[NDArray[np.int64]]:
    """Pack sequences that are concatenated in `input_ids`."""
    return PackedTokens(input_ids, positions_in(cu_seqlens), cu_seqlens, int(np.diff(cu_seqlens).max()), token_type_ids)


def pack_sequences(sequences: Sequence[Sequence[int] | NDArray[np.integer]]) -> PackedTokens[NDArray[np.int64]]:
    """Concatenate and pack some sequences."""
    input_ids = np.concatenate([np.asarray(each, np.int64) for each in sequences])
    return pack(input_ids, cumulative_lengths([len(each) for each in sequences]))
