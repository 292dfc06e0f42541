"""The C library's allocator, set for training on a CPU."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep the memory of freed tensors instead of giving it back to the kernel. Linux with glibc.

    glibc maps every large tensor anew and unmaps it when it is freed, so each training step pays for zeroed pages
    (`benchmarks/ann_snn.py --allocator` measures what that costs). Kept, the process stays at the size of its peak.
    Call it before the first step.

    Returns:
        Whether the allocator took the settings; False on other systems, where nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, 2**31 - 1), mallopt(_TOP_PAD, 2**26)])
