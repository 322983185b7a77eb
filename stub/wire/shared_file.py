"""Memory that processes share: a file without a name, mapped by whoever has its descriptor."""

import ctypes
import mmap
import os
from typing import Optional, Tuple

PAGE = mmap.PAGESIZE

_NORESERVE = 0x4000  # of <sys/mman.h>, as is the next (Linux 5.14)
_POPULATE_WRITE = 23
_ENTRY = 8  # bytes of /proc/self/pagemap for a page; the last has the flags
_FILES = bytes(flags for flags in range(256) if flags >> 5 & 1 or not flags >> 6)
"""Such flags has a page that is not there, or that is the file's: bit 5 says that, 6 and 7 where it
is."""

_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4  # of fcntl; not in every Python's module


def create(name: str, size: int) -> int:
    """A new sparse file of `size` bytes, as a descriptor. Raises OSError.

    Its size is sealed: a process that shrank it would make others' next read a SIGBUS.
    """
    if not hasattr(os, "memfd_create"):
        fd = _create_named(name)
        os.ftruncate(fd, size)
        return fd
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    import fcntl

    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    return fd


def _create_named(name: str) -> int:
    """POSIX shared memory, where memfd is missing; the name is gone before anybody sees it."""
    import posix_ipc

    memory = posix_ipc.SharedMemory(f"/{name}-{os.urandom(8).hex()}", posix_ipc.O_CREX, mode=0o600)
    memory.unlink()
    return int(memory.fd)


class Mapping:
    """A file in this process's memory, for as long as `view` or a part of it is used."""

    def __init__(self, fd: int, size: int, writable: bool, offset: int = 0) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._map = mmap.mmap(fd, size, prot=protection, offset=offset)
        self.view = memoryview(self._map)

    def let_go(self) -> None:
        """This object no longer keeps the memory mapped; parts of `view` still do."""
        self.view = memoryview(b"")
        del self._map

    def punch(self, offset: int, size: int) -> None:
        """Give the memory of these bytes (whole pages) back to the system; they read as zero."""
        self._map.madvise(mmap.MADV_REMOVE, offset, size)


def identity(fd: int) -> Tuple[int, int]:
    """Which file that is: device and inode."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class PrivateMapping:
    """A file, mapped by a process that keeps what it writes there to itself, page by page.

    `address` is where it begins; `place` is where that is in the `file`, which `identity` names.
    Offsets and sizes are in bytes from `address`, and of whole pages.
    """

    def __init__(self, fd: int, size: int, offset: int, region: bool) -> None:
        """Raises OSError or ValueError if that cannot be here; `region`: a client's memory."""
        global _page_map
        if _page_map is None:
            _page_map = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self.file = identity(fd)
        self.place = offset
        self.region = region
        flags = mmap.MAP_PRIVATE | _NORESERVE
        self._map = mmap.mmap(fd, size, flags=flags, offset=offset)
        self._map.madvise(_POPULATE_WRITE, 0, 0)  # does nothing, if the kernel knows it
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def is_changed(self, offset: int, size: int) -> bool:
        """Whether a page has been written to."""
        assert _page_map is not None
        count = -(-size // PAGE)
        entries = os.pread(_page_map, count * _ENTRY, (self.address + offset) // PAGE * _ENTRY)
        return len(entries) < count * _ENTRY or bool(entries[7::8].translate(None, _FILES))

    def forget(self, offset: int, size: int) -> None:
        """Show the file again where pages were written to."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, size)

    def part(self, offset: int, size: int) -> None:
        """Copy each page that is not a copy yet. Raises OSError."""
        self._map.madvise(_POPULATE_WRITE, offset, size)


_page_map: Optional[int] = None
