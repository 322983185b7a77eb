"""The heap of a process: what becomes of freed memory, and what is looked at for garbage."""

import ctypes
import gc

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of glibc's mallopt
_LARGEST_KEPT = 32 << 20  # bytes; glibc takes no more


def tune_malloc(most: int = 64 << 20) -> None:
    """Let the C library keep up to `most` bytes of freed memory at the heap's end for what comes
    next, blocks of megabytes too.

    By default these are fetched from the kernel afresh, and every page of them faults: for 4 MB
    that takes many times longer than filling it. Where there is no glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, most)


def freeze_gc() -> None:
    """Let collections of garbage pass over all that exists by now: modules, and what they hold.

    It is for a process that has imported what it needs. Of a host, a full collection looked at all
    of that for 30 ms, and under load it came once in a second.
    """
    gc.collect()
    gc.freeze()
