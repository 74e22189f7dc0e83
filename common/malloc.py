"""How glibc's malloc gives freed memory back to the kernel."""

import ctypes
import platform
from functools import cache

import numpy as np

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1


def disable_malloc_trim() -> None:
    """Make glibc keep all freed memory for later allocations; for a process that trains or generates text.

    Each step frees and allocates the same large blocks; fresh pages are zeroed at their first touch, which takes 5 to
    7 % of a step on a CPU (bench/README.md).
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


@cache
def raise_mmap_threshold() -> None:
    """Make glibc reuse freed blocks of up to 32 MiB; for the preparation's workers, which shall not keep more.

    Fresh pages take a third of the time of finding near duplicates and about a twentieth of encoding. glibc raises its
    threshold to the size of any mapped block that is freed and then keeps up to twice as much (mallopt(3),
    M_MMAP_THRESHOLD), here 64 MiB. No page of the array below is touched.
    """
    np.empty(2**25 - 2**14, np.uint8)
