"""Tunes malloc and the garbage collector of a process."""

import ctypes
import gc
import os
from typing import Tuple

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _MAX_HEAPS = -3, -1, -8  # parameters of glibc's mallopt
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LARGEST_KEPT = 32 << 20  # bytes; the maximum that glibc accepts


def tune_malloc(max_bytes: int = 64 << 20, one_heap: bool = False) -> None:
    """Makes the C library keep up to `max_bytes` of freed memory, even of blocks of megabytes.

    `one_heap`: all threads share one heap, because the C library never trims the end of others.

    By default such blocks come from the kernel each time, and every page faults: for 4 MB that
    takes many times longer than filling the block. Without glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, max_bytes)
        if one_heap:
            mallopt(_MAX_HEAPS, 1)


class _Mallinfo2(ctypes.Structure):
    """What `mallinfo2` of glibc returns, in bytes.

    `fordblks` are free in all heaps, `uordblks` in use there, and `hblkhd` in use outside of them.
    """

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class HeapTrimmer:
    """Gives memory back to the system that the C library keeps free in all its heaps.

    Does nothing without glibc 2.33 or later.
    """

    def __init__(self, max_free: int = 32 << 20) -> None:
        self._max_free = max_free
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        self._info = getattr(library, "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _Mallinfo2
        # What malloc_trim has given back still counts as free, until it is used again.
        self._given_back, self._least_other = self._measure()  # since the last trim, or the start
        self._kept = 0

    def trim(self) -> None:
        """Trims the heaps if more than `max_free` bytes were kept free at two calls.

        Trimming takes milliseconds, and so does using the memory again, so a single large request
        is not enough.
        """
        free, other = self._measure()
        self._given_back = min(self._given_back, free)
        self._least_other = min(self._least_other, other)
        # Memory that was given back, used and freed since the last call has grown again unseen.
        grown = min(free, other - self._least_other)
        before, self._kept = self._kept, max(free - self._given_back, grown)
        if self._trim is not None and min(before, self._kept) > self._max_free:
            self._trim(0)
            self._given_back, self._least_other = self._measure()
            self._kept = 0

    def _measure(self) -> Tuple[int, int]:
        """Returns the bytes free in heaps, and the private ones that malloc has not given out.

        The latter are what is free and not given back, and what does not come from malloc.
        """
        if self._info is None:
            return 0, 0
        info = self._info()
        return int(info.fordblks), _private_bytes() - int(info.uordblks) - int(info.hblkhd)


def _private_bytes() -> int:
    """Resident memory that is shared with no file and no other process; 0 without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared = file.read().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def freeze_gc() -> None:
    """Excludes all present objects, such as modules, from garbage collections.

    Call it after all imports. Without it, a full collection in the host visits these objects for 30
    ms, under load once a second.
    """
    gc.collect()
    gc.freeze()
