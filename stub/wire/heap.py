"""Tunes malloc and the garbage collector of a process."""

import ctypes
import gc

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of glibc's mallopt
_LARGEST_KEPT = 32 << 20  # bytes; the maximum that glibc accepts


def tune_malloc(max_bytes: int = 64 << 20) -> None:
    """Makes the C library keep up to `max_bytes` of freed memory, even of blocks of megabytes.

    By default such blocks come from the kernel each time, and every page faults: for 4 MB that
    takes many times longer than filling the block. Without glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, max_bytes)


def freeze_gc() -> None:
    """Excludes all present objects, such as modules, from garbage collections.

    Call it after all imports. Without it, a full collection in the host visits these objects for 30
    ms, under load once a second.
    """
    gc.collect()
    gc.freeze()
