"""Which of several weighted sources each position of a stream draws from."""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import key_of
from multihop.pretrain.data.permutation import permute

Int64 = NDArray[np.int64]
MIXTURE_BLOCK = 2**16
"""Positions within which the weights hold exactly; also the largest number of sources that can be mixed."""


@lru_cache(maxsize=8)
def quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Each source's number of positions in a block: by largest remainder, at least one, `MIXTURE_BLOCK` in all."""
    assert 0 < len(weights) <= MIXTURE_BLOCK and min(weights) > 0, weights
    exact = [Fraction(weight) for weight in weights]
    small: set[int] = set()
    while True:
        room, shared = MIXTURE_BLOCK - len(small), sum(w for i, w in enumerate(exact) if i not in small)
        ideal = [Fraction(1) if i in small else w * room / shared for i, w in enumerate(exact)]
        too_small = {i for i, share in enumerate(ideal) if share < 1}
        if not too_small:
            break
        small |= too_small
    whole = [math.floor(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (whole[i] - ideal[i], i))
    for i in by_remainder[: MIXTURE_BLOCK - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


def draw(positions: Int64, quota: tuple[int, ...], *key: int | str) -> tuple[Int64, Int64]:
    """The source of each position of a mixed stream, and the position in that source's own stream."""
    blocks, within = np.divmod(positions, MIXTURE_BLOCK)
    sources, drawn = np.empty_like(positions), np.empty_like(positions)
    for block in np.unique(blocks).tolist():
        mine = blocks == block
        block_sources, ranks = _mixed_block(quota, key_of(*key, block))
        sources[mine], drawn[mine] = block_sources[within[mine]], ranks[within[mine]]
    return sources, blocks * np.asarray(quota, np.int64)[sources] + drawn


def upcoming(position: int, quota: tuple[int, ...], *key: int | str) -> Int64:
    """int64 (sources,): the position in each source's own stream that is drawn next at a position of the mixed one."""
    block, within = divmod(position, MIXTURE_BLOCK)
    sources, _ = _mixed_block(quota, key_of(*key, block))
    return block * np.asarray(quota, np.int64) + np.bincount(sources[:within], minlength=len(quota))


@lru_cache(maxsize=4)
def _mixed_block(quota: tuple[int, ...], key: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """For each position of a block its source, and the number of earlier positions in the block with the same source.

    A whole block is computed at once, because each source walks its own stream in order; most steps find their block
    in the cache.
    """
    slots = permute(np.arange(MIXTURE_BLOCK, dtype=np.uint64), MIXTURE_BLOCK, key)
    sources = np.repeat(np.arange(len(quota)), quota)[slots]
    by_source = np.argsort(sources, kind="stable")
    ranks = np.empty(MIXTURE_BLOCK, np.uint16)
    ranks[by_source] = np.concatenate([np.arange(share) for share in quota])
    return sources.astype(np.uint16), ranks
