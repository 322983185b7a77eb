"""Shared memory for large tensors, where the server is on the same machine.

A region is POSIX shared memory that the server opens by its name; then the name is removed. So a
client that is killed leaves no file. It also holds a lock (flock) of the object, by which the
server notices that the client has gone (docs/reference/protocol.md, "Shared memory").
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import weakref
from collections import deque

import numpy as np
import posix_ipc

from host.client.signature import LARGE, EncodedTensor
from stub.wire.shared_file import Mapping

_ALIGNMENT = 64
_MAX_REGIONS = 32
_MAX_LOSSES = 3
_MANY_USES = 100
_MAX_ABANDONED = 1024


def aligned(size: int) -> int:
    """Rounds up, so that the next tensor begins where the processor likes it."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _size_of_region(size: int) -> int:
    """Rounds up by at most an eighth, so that regions fit tensors whose sizes differ a little."""
    step = max(LARGE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step


class Region:
    """One object in shared memory. Raises OSError if it cannot be made."""

    def __init__(self, size: int) -> None:
        self.name = f"pbhost-client-{os.getpid()}-{secrets.token_hex(8)}"
        self.key = f"/{self.name}"
        self.size = size
        self.registered = False
        try:
            memory = posix_ipc.SharedMemory(self.key, posix_ipc.O_CREX, mode=0o600)
        except posix_ipc.Error as error:
            raise OSError(str(error)) from error
        fd = int(memory.fd)
        self._named = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, size)  # a full /dev/shm is an error here, not a SIGBUS
            self._mapping = Mapping(fd, size, True)
        except BaseException:  # also if interrupted, as nothing else owns the descriptor yet
            self.unlink()
            os.close(fd)
            raise
        self._close_file = weakref.finalize(self, os.close, fd)  # also of a client without `close`

    def unlink(self) -> None:
        """Removes the name; the server has opened the object, or never will."""
        if self._named:
            self._named = False
            posix_ipc.unlink_shared_memory(self.key)

    def write(self, offset: int, tensor: EncodedTensor) -> None:
        """Copies the content of a tensor into the region."""
        content = tensor.content
        if isinstance(content, bytes):
            self._mapping.view[offset : offset + len(content)] = content
        else:
            place = self._mapping.view[offset : offset + content.nbytes]
            np.frombuffer(place, content.dtype).reshape(content.shape)[...] = content

    def read(self, offset: int, size: int) -> memoryview:
        """The bytes of an output, as long as the region is not used again."""
        return self._mapping.view[offset : offset + size]

    def close(self) -> None:
        """Frees the memory of this process; nothing if that has been done."""
        if self._close_file.alive:
            self.unlink()
            self._mapping.unmap()
            self._close_file()


class Regions:
    """The regions of one client; any thread may call.

    `usable`: whether large tensors go by shared memory. False once the server has refused a region,
    or several times did not know one: then requests reach another server.
    """

    def __init__(self, usable: bool) -> None:
        self.usable = usable
        self._lock = threading.Lock()
        self._all: set[Region] = set()
        self._free: list[Region] = []
        self._abandoned: deque[str] = deque(maxlen=_MAX_ABANDONED)
        self._losses = 0
        self._uses = 0  # since the last loss

    def take(self, size: int) -> Region | None:
        """A registered region that is free and large enough."""
        with self._lock:
            fitting = [region for region in self._free if region.size >= size]
            if not fitting:
                return None
            region = min(fitting, key=lambda region: region.size)
            self._free.remove(region)
            return region

    def create(self, size: int) -> Region | None:
        """A new region, to be registered; None if there is no memory for it, or there are many."""
        with self._lock:
            if len(self._all) >= _MAX_REGIONS:
                return None
            try:
                region = Region(_size_of_region(size))
            except OSError:  # the tensors go in the message
                return None
            self._all.add(region)
            return region

    def give_back(self, region: Region) -> None:
        """The server does not use the region any more."""
        with self._lock:
            self._uses += 1
            if region in self._all:
                self._free.append(region)
                return
        region.close()  # lost with another one, or the client has been closed

    def abandon(self, region: Region) -> None:
        """The server may still use the region, so no other request may.

        A server that sees its lock gone unregisters it; others, when the client is closed: they
        might unmap memory that they use.
        """
        with self._lock:
            if region in self._all:
                self._all.remove(region)
                self._abandoned.append(region.name)
        region.close()

    def lose(self, region: Region) -> None:
        """The server does not know a region: it has been started again, or is another one."""
        free: list[Region] = []
        with self._lock:
            if region in self._all:  # otherwise it was lost with another one
                self._losses = 1 if self._uses >= _MANY_USES else self._losses + 1
                self._uses = 0
                if self._losses >= _MAX_LOSSES:
                    self.usable = False
                free, self._free = self._free, []
                self._all.clear()
        for lost in (region, *free):
            lost.close()

    def discard(self, region: Region) -> None:
        """Frees a region that could not be registered."""
        with self._lock:
            self._all.discard(region)
        region.close()

    def close(self) -> list[str]:
        """Frees all regions; those in use, after their requests. No new ones are made.

        Returns names that the server may know.
        """
        self.usable = False
        with self._lock:
            names = [*self._abandoned, *(region.name for region in self._all)]
            free, self._free = self._free, []
            self._all.clear()
            self._abandoned.clear()
        for region in free:
            region.close()
        return names
