"""Memory that processes share: a file without a name, mapped by whoever has its descriptor."""

import mmap
import os
from typing import Tuple

PAGE = mmap.PAGESIZE

_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4  # of fcntl; not in every Python's module


def create_shared_file(name: str, size: int) -> int:
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

    def unmap(self) -> None:
        """This object no longer keeps the memory mapped; parts of `view` still do."""
        self.view = memoryview(b"")
        del self._map

    def punch_hole(self, offset: int, size: int) -> None:
        """Give the memory of these bytes (whole pages) back to the system; they read as zero."""
        self._map.madvise(mmap.MADV_REMOVE, offset, size)


def file_identity(fd: int) -> Tuple[int, int]:
    """Which file that is: device and inode."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
