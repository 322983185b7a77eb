"""Files mapped copy-on-write: what a process writes there is its own, page by page."""

import ctypes
import mmap
import os
import resource
import sys
from typing import Any, List, Optional, Tuple

from stub.wire.shared_file import PAGE, file_identity

_NORESERVE = 0x4000  # of <sys/mman.h>, as is the next (Linux 5.14)
_POPULATE_WRITE = 23
_MAX_MAPPED_BYTES = 16 << 40  # bytes, of the 128 TiB that a process has; arenas need theirs first
_PAGEMAP_ENTRY_SIZE = 8  # bytes of /proc/self/pagemap for a page; the last has the flags
_UNCHANGED_PAGE_FLAGS = bytes(flags for flags in range(256) if flags >> 5 & 1 or not flags >> 6)
"""Such flags has a page that is not there, or that is the file's: bit 5 says that, 6 and 7 where it
is."""


class CopyOnWriteMapping:
    """A file, mapped by a process that keeps what it writes there to itself, page by page.

    `address` is where it begins; `file_offset` is where that is in the `file`, which
    `file_identity` names. Offsets and sizes are in bytes from `address`, and of whole pages.
    """

    def __init__(self, fd: int, size: int, offset: int, region: bool) -> None:
        """Raises OSError or ValueError if that cannot be here; `region`: a client's memory."""
        global _page_map, _mapped_bytes
        if sys.byteorder != "little" or _address_space_is_limited():
            raise OSError("private mappings are for machines that have addresses to spare")
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
        self._map.madvise(_POPULATE_WRITE, 0, 0)  # does nothing, if the kernel knows it
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _mapped_bytes += size

    def __del__(self) -> None:
        global _mapped_bytes
        if hasattr(self, "address"):
            _mapped_bytes -= self._size

    def is_changed(self, offset: int, size: int) -> bool:
        """Whether a page has been written to."""
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
        """Show the file again where pages were written to, zeros after `replace_with_copy`.

        Raises OSError.
        """
        self._map.madvise(mmap.MADV_DONTNEED, offset, size)

    def copy_pages(self, offset: int, size: int) -> None:
        """Copy each page that is not a copy yet. Raises OSError. Other threads run meanwhile."""
        _call_libc(_libc.madvise, self.address + offset, size, _POPULATE_WRITE)

    def replace_with_copy(self, offset: int, size: int) -> None:
        """As `copy_pages`, for good: if the file shrinks, the kernel takes even such copies away.

        What another thread writes there at this moment may be lost. Raises OSError.
        """
        self.copy_pages(
            offset, size
        )  # an error, and no SIGBUS, where the file is too short already
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
        """Let go of the file, except for these parts, which are (start, end) in order.

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
    """Whether a mapping that reserves no memory counts nevertheless."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        with open("/proc/sys/vm/overcommit_memory") as setting:
            return setting.read().strip() == "2"
    except OSError:
        return True


def _call_libc(function: Any, *arguments: Any) -> int:
    """Call the C library. Raises OSError."""
    result: int = function(*arguments)
    if result == -1 or result == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


_page_map: Optional[int] = None
_mapped_bytes = 0  # bytes of all private mappings
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
_FIXED = 0x10  # of <sys/mman.h>
_MAYMOVE_FIXED = 1 | 2
