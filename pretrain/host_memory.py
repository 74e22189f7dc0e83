"""How the C library hands out memory to this process."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next tensor, in place of giving it back to the kernel.

    A step frees and takes the same large blocks again and again; fresh pages are zeroed at their first touch, which
    takes 5 to 7 % of a step on a CPU (bench/README.md).
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
