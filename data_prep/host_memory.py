"""How the C library hands out memory to a process that prepares text."""

from functools import cache

import numpy as np


@cache
def keep_freed_blocks() -> None:
    """Let the C library keep the blocks that a batch frees for the next one: fresh pages take time at first touch.

    It is a third of finding near duplicates and about a twentieth of making tokens. glibc maps and gives back blocks
    from a size on that grows to that of any such block that was freed (mallopt(3), M_MMAP_THRESHOLD); it keeps twice as
    much, here 64 MB. No page of this one is ever touched.
    """
    np.empty(2**25 - 2**14, np.uint8)
