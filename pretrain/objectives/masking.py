"""Which pieces a masked-word model has to predict, and what stands in their place (Devlin et al. 2018, section 3.1)."""

import numpy as np
from numpy.typing import NDArray

from pretrain.keyed import UInt64, random_bits, uniform


def mask_pieces(
    input_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    keys: UInt64,
    mask_rate: float,
    special_ids: dict[str, int],
    vocab_size: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Mask a fixed count of each sequence's pieces, never special ones.

    As in the original, a sequence of n pieces (special ones counted) gets max(1, round(mask_rate * n)) predictions;
    of the chosen pieces 80 % become [MASK], 10 % a random ordinary piece, 10 % stay.

    Args:
        input_ids: int64 (B, T).
        lengths: int64 (B,).
        keys: uint64 (B,); the same key masks the same sequence in the same way, wherever it stands in a batch.

    Returns:
        The masked copy, int64 (B, T); flat positions in (B*T,) to predict, int64 (M,), ascending; what stood there.
    """
    batch, length = input_ids.shape
    specials = np.array(sorted(special_ids.values()))
    ordinary = np.setdiff1d(np.arange(vocab_size), specials)
    columns = np.arange(length, dtype=np.uint64)
    maskable = ~np.isin(input_ids, specials) & (np.arange(length) < lengths[:, None])
    count = np.minimum(np.maximum(1, np.rint(mask_rate * lengths)), maskable.sum(1)).astype(np.int64)

    ranks = random_bits(keys[:, None], columns)
    ranks[~maskable] = np.iinfo(np.uint64).max
    by_rank = np.argsort(ranks, axis=1, kind="stable")
    chosen = np.zeros((batch, length), bool)
    np.put_along_axis(chosen, by_rank, np.arange(length) < count[:, None], axis=1)

    row, column = np.nonzero(chosen)
    counters = columns[column]
    action = uniform(random_bits(keys[row] ^ np.uint64(1), counters))
    random_piece = ordinary[(uniform(random_bits(keys[row] ^ np.uint64(2), counters)) * len(ordinary)).astype(np.int64)]
    original = input_ids[row, column]
    masked = input_ids.copy()
    masked[row, column] = np.where(action < 0.8, special_ids["mask"], np.where(action < 0.9, random_piece, original))
    return masked, row * length + column, original
