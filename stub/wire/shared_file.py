"""Shared memory: unnamed files, which a process maps by their descriptor."""

import mmap
import os
from typing import Tuple

PAGE = mmap.PAGESIZE

_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4  # of fcntl; some Pythons lack them


def create_shared_file(name: str, size: int) -> int:
    """Creates a sparse file of `size` bytes; returns its descriptor. Raises OSError.

    The size is sealed: if a process could shrink the file, another one would get a SIGBUS.
    """
    sealable = hasattr(os, "memfd_create")
    if sealable:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        fd = _create_named(name)
    try:
        os.ftruncate(fd, size)
        if sealable:
            import fcntl

            fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    except BaseException:  # also if interrupted, as the descriptor has no other owner
        os.close(fd)
        raise
    return fd


def _create_named(name: str) -> int:
    """Creates POSIX shared memory, for systems without memfd, and removes its name at once."""
    import posix_ipc

    memory = posix_ipc.SharedMemory(f"/{name}-{os.urandom(8).hex()}", posix_ipc.O_CREX, mode=0o600)
    memory.unlink()
    return int(memory.fd)


class Mapping:
    """A mapped file; it stays mapped while `view` or a part of it is used."""

    def __init__(self, fd: int, size: int, writable: bool, offset: int = 0) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._map = mmap.mmap(fd, size, prot=protection, offset=offset)
        self.view = memoryview(self._map)

    def unmap(self) -> None:
        """Drops the reference to the memory; it stays mapped for other users of `view`."""
        self.view = memoryview(b"")
        del self._map

    def punch_hole(self, offset: int, size: int) -> None:
        """Returns the memory of these bytes (whole pages) to the system; they read as zero then."""
        self._map.madvise(mmap.MADV_REMOVE, offset, size)


def file_identity(fd: int) -> Tuple[int, int]:
    """Returns the device and the inode of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
