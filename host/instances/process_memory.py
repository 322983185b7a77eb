"""The blocks that the host and another process hold of each other: a stub or a frontend process.

Frontend processes need some of it, too, so it does not import the connection to stubs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from host.errors import HostError, internal
from host.instances.arenas import HOST_ARENA, ArenaFile, Arenas
from stub.wire.arena import (
    ArenaFull,
    BlockReferences,
    DroppedBlocks,
    collect_releases,
)
from stub.wire.messages import BlockRelease, CloseArena


class ReleaseTimer:
    """Calls `flush` soon in the event loop, from whichever thread dropped the last reference.

    Not at once: the next batch usually comes first and carries the releases.
    """

    _DELAY = 0.02

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._scheduled = False
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()

    def schedule(self) -> None:
        """Schedules `flush`."""
        if self._scheduled or self._loop.is_closed():
            return
        self._scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_later(self._DELAY, self._run)
        else:
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False
        self._flush()


class ProcessMemory:
    """The references to blocks that the host exchanges with one process.

    `file`: the arena of the process; after its end, it lives as long as one of its blocks. `flush`
    sends the releases soon. `close_arena` sends that an announced arena is gone. `readers`: parts
    of the process that get messages in no order with each other, so that each must learn of arenas.
    """

    def __init__(
        self,
        arenas: Arenas,
        file: ArenaFile,
        flush: Callable[[], None],
        close_arena: Callable[[CloseArena], None],
        readers: Iterable[str],
    ) -> None:
        self._arenas = arenas
        self._file: ArenaFile | None = file
        self._number = file.number
        self._exported = BlockReferences()
        self.dropped: DroppedBlocks = file.dropped
        """The blocks of the process that the host has released since `collect_releases`."""
        file.set_drop_handler(ReleaseTimer(flush).schedule)
        self._announced = {reader: {HOST_ARENA, file.number} for reader in readers}
        self._close_arena = close_arena
        arenas.on_closed.append(self._on_arena_closed)

    @property
    def arena(self) -> ArenaFile:
        """The arena of the process, until it has ended."""
        assert self._file is not None
        return self._file

    def _on_arena_closed(self, number: int) -> None:
        readers = [known for known in self._announced.values() if number in known]
        for known in readers:
            known.discard(number)
        if readers:
            self._close_arena(CloseArena(number))

    def release_blocks(self, message: BlockRelease) -> None:
        """Releases blocks that the process has returned. Raises KeyError for unknown blocks."""
        self._exported.release_blocks(message)

    def collect_releases(self) -> BlockRelease | None:
        """A message with the blocks of the process that the host has released, or None."""
        return None if self._file is None else collect_releases(self.dropped)

    def process_exited(self) -> None:
        """Releases everything that was exported. What the process has sent stays valid."""
        self._exported.release_all()
        if self._file is not None:
            self._arenas.on_closed.remove(self._on_arena_closed)
            self._file.set_drop_handler(None)
            self._file = None
            self.dropped.clear()


def arena_full_error(full: ArenaFull) -> HostError:
    """The error with its documented text and advice.

    Source: docs/reference/model-api.md, "Options and shared memory".
    """
    return internal(
        "Failed to increase the shared memory pool size for key 'pbhost-host' to"
        f" {full.used + full.requested} bytes. Error: {full};"
        " raise --arena-byte-size or send smaller tensors"
    )
