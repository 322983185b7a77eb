"""Tunes malloc and the garbage collector of a process."""

import ctypes
import gc
import os

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


class HeapTrimmer:
    """Gives memory back to the system that the C library keeps free in all its heaps."""

    def __init__(self, max_growth: int = 64 << 20) -> None:
        self._max_growth = max_growth
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        self._lowest = self._before = _private_bytes()

    def trim(self) -> None:
        """Trims the heap if the process had grown by more than `max_growth` bytes at two calls.

        Trimming takes milliseconds, and so does using the memory again, so a single large request
        is not enough.
        """
        try:
            before, self._before = self._before, _private_bytes()
        except OSError:  # no descriptor is left
            return
        self._lowest = min(self._lowest, self._before)
        if self._trim is not None and min(before, self._before) > self._lowest + self._max_growth:
            self._trim(0)
            self._lowest = self._before = _private_bytes()


def _private_bytes() -> int:
    """Resident memory of this process that it does not share, in bytes. Raises OSError."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def freeze_gc() -> None:
    """Excludes all present objects, such as modules, from garbage collections.

    Call it after all imports. Without it, a full collection in the host visits these objects for 30
    ms, under load once a second.
    """
    gc.collect()
    gc.freeze()
