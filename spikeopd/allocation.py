"""Memory that training frees and takes again, kept by the process. Standard library; glibc alone has the switch."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h
SLICE = 64 << 20  # the heap grows by so much at a time


def keep_freed_memory() -> bool:
    """Ask the C library not to return freed memory to the operating system; whether it agreed.

    Every tensor above 32 MiB otherwise comes from the system anew, page by page, each time it is made: for the neurons
    of OPT-125M's width that costs more than computing them. Who sets MALLOC_… variables has decided already.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(option, value) for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, SLICE))
    )
