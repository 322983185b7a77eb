"""Every arena of one server: the host creates them all and knows where others find them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable

from stub.wire.arena import Arena, ArenaReader, Block, create_file

HOST = 0
"""Number of the host's own arena."""


class ArenaFile:
    """A stub's arena as the host sees it. The file stays open while any block in it is alive."""

    def __init__(self, number: int, limit: int, closed: Callable[[int], None]) -> None:
        self.number = number
        self.limit = limit
        self._closed = closed
        self.fd = create_file("pbhost-stub", limit)
        self._reader = ArenaReader(self.fd, limit)

    @property
    def path(self) -> str:
        """Where processes of this user can open it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def slice(self, offset: int, size: int) -> memoryview:
        """The bytes of a block. Raises ValueError if they lie outside."""
        return self._reader.slice(offset, size)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)
            self._closed(self.number)


class Arenas:
    """`limit` is what one process's tensors may take, in bytes. Raises OSError if memory lacks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.host_fd = create_file("pbhost-host", limit)
        self.host = Arena(HOST, self.host_fd, limit)
        self._numbers = itertools.count(HOST + 1)
        self._files: dict[int, str] = {}
        self._loop = asyncio.get_running_loop()
        self.on_closed: list[Callable[[int], None]] = []

    def create(self) -> ArenaFile:
        """An arena for a new stub."""
        file = ArenaFile(next(self._numbers), self.limit, self._gone)
        self._files[file.number] = file.path
        return file

    def path(self, number: int) -> str:
        """Where a stub opens an arena. Raises KeyError if it is gone."""
        return self._files[number]

    def _gone(self, number: int) -> None:
        """A file was closed, maybe by the collector: in any thread, in the middle of anything."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget, number)

    def _forget(self, number: int) -> None:
        self._files.pop(number, None)
        for callback in list(self.on_closed):
            callback(number)

    def close(self) -> None:
        """Give the host's arena up; its memory goes with the last block in it."""
        os.close(self.host_fd)


def is_block(owner: object) -> bool:
    """Whether a tensor with this owner lies in shared memory and can be passed by reference."""
    return isinstance(owner, Block)
