"""Counter-based random numbers: each is a hash of a key and a counter, so any of them can be computed at any time.

Used for the order of samples, masks, initial weights and dropout. These functions may never change: a run resumed with
a newer version must draw the same numbers.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]


def key_of(*parts: int | str) -> int:
    """Hash `parts` to a 64-bit key; different parts give different keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def mix(values: UInt64) -> UInt64:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014, figure 15), a bijection that mixes the bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def random_bits(key: int | UInt64, counters: UInt64) -> UInt64:
    """Return uint64 of `counters`' shape (broadcast with `key`): the random numbers of `key` at these counters."""
    return mix(mix(counters + np.uint64(0x9E3779B97F4A7C15)) ^ np.asarray(key, np.uint64))


def uniform(bits: UInt64) -> NDArray[np.float64]:
    """Return float64 in [0, 1) from the upper 53 of 64 random bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
