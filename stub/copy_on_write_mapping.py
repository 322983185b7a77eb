"""Maps files copy-on-write: a write changes the process's own copy of a page, not the file."""

import ctypes
import mmap
import os
import resource
import sys
from typing import Any, List, Optional, Tuple

from stub.wire.shared_file import PAGE, file_identity

_NORESERVE = 0x4000  # from <sys/mman.h>, like the next one (Linux 5.14)
_POPULATE_WRITE = 23
_MAX_MAPPED_BYTES = 16 << 40  # bytes; a process has 128 TiB of addresses, and the arenas need some
_PAGEMAP_ENTRY_SIZE = 8  # bytes per page in /proc/self/pagemap; the last one holds the flags
_UNCHANGED_PAGE_FLAGS = bytes(flags for flags in range(256) if flags >> 5 & 1 or not flags >> 6)
"""Flag bytes of pages without changes: the page belongs to the file (bit 5), or is not present
(bits 6 and 7 are clear)."""


class CopyOnWriteMapping:
    """A copy-on-write mapping of a file: what this process writes is not written to the file.

    `address` is the start of the mapping. `file_offset` is the position of that start in `file`, an
    identity from `file_identity`. The methods take offsets from `address` and sizes, in bytes; both
    are multiples of the page size.
    """

    def __init__(self, fd: int, size: int, offset: int, region: bool) -> None:
        """Maps `size` bytes of the file; `region` tells whether they are a client's shared memory.

        Raises OSError or ValueError if the file cannot be mapped.
        """
        global _page_map, _mapped_bytes
        if sys.byteorder != "little" or _address_space_is_limited():
            raise OSError("copy-on-write mappings need an unlimited address space")
        if _mapped_bytes + size > _MAX_MAPPED_BYTES:
            raise OSError(f"{_mapped_bytes} bytes are mapped already")
        if _page_map is None:
            _page_map = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self.file = file_identity(fd)
        self.file_offset = offset
        self.is_client_region = region
        self.released = False
        self._size = size
        flags = mmap.MAP_PRIVATE | _NORESERVE
        self._map = mmap.mmap(fd, size, flags=flags, offset=offset)
        self._map.madvise(_POPULATE_WRITE, 0, 0)  # no bytes: fails if the kernel lacks it
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _mapped_bytes += size

    def __del__(self) -> None:
        global _mapped_bytes
        if hasattr(self, "address"):
            _mapped_bytes -= self._size

    def is_changed(self, offset: int, size: int) -> bool:
        """Returns whether this process has written to any of the pages."""
        assert _page_map is not None
        count = -(-size // PAGE)
        entries = os.pread(
            _page_map,
            count * _PAGEMAP_ENTRY_SIZE,
            (self.address + offset) // PAGE * _PAGEMAP_ENTRY_SIZE,
        )
        return len(entries) < count * _PAGEMAP_ENTRY_SIZE or bool(
            entries[7::8].translate(None, _UNCHANGED_PAGE_FLAGS)
        )

    def discard_changes(self, offset: int, size: int) -> None:
        """Reverts the pages to the content of the file; to zeros after `replace_with_copy`.

        Raises OSError.
        """
        self._map.madvise(mmap.MADV_DONTNEED, offset, size)

    def copy_pages(self, offset: int, size: int) -> None:
        """Copies each page that is not a copy yet. Raises OSError.

        Other threads may write to the pages meanwhile.
        """
        _call_libc(_libc.madvise, self.address + offset, size, _POPULATE_WRITE)

    def replace_with_copy(self, offset: int, size: int) -> None:
        """Replaces the pages by anonymous memory with the same content. Raises OSError.

        Unlike the copies of `copy_pages`, these pages stay when the file shrinks. A write of
        another thread during the call may be lost.
        """
        # Raises an error if the file is too short; touching the pages would be a SIGBUS.
        self.copy_pages(offset, size)
        size = -(-size // PAGE) * PAGE
        copy = _call_libc(_libc.mmap, None, size, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        target = self.address + offset
        ctypes.memmove(copy, target, size)
        try:
            _call_libc(_libc.mremap, copy, size, size, _MAYMOVE_FIXED, target)
        except OSError:
            _call_libc(_libc.munmap, copy, size)
            raise

    def release_file(self, kept: List[Tuple[int, int]]) -> None:
        """Unmaps the file, except for the parts in `kept`: sorted pairs (start, end).

        Raises OSError.
        """
        self.released = True
        flags = _PRIVATE_ANONYMOUS | _FIXED | _NORESERVE
        ends = [0, *(end for _, end in kept)]
        starts = [*(start for start, _ in kept), -(-self._size // PAGE) * PAGE]
        for start, end in zip(ends, starts):
            if start < end:
                _call_libc(_libc.mmap, self.address + start, end - start, 0, flags, -1, 0)


def _address_space_is_limited() -> bool:
    """Returns whether the system counts mappings that reserve no memory towards a limit."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        with open("/proc/sys/vm/overcommit_memory") as setting:
            return setting.read().strip() == "2"
    except OSError:
        return True


def _call_libc(function: Any, *arguments: Any) -> int:
    """Calls a function of the C library. Raises OSError."""
    result: int = function(*arguments)
    if result == -1 or result == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


_page_map: Optional[int] = None
_mapped_bytes = 0  # bytes of all copy-on-write mappings
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_size_t
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_libc.mremap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
    ctypes.c_void_p,
)
_libc.mremap.restype = ctypes.c_size_t
_FAILED = ctypes.c_size_t(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED = 0x10  # from <sys/mman.h>
_MAYMOVE_FIXED = 1 | 2
