"""The arenas of a server, by number, and the blocks that the host exchanges with each process.

Frontend processes need the blocks, too, so nothing here imports the connection to stubs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import ReferenceType, ref

from host.errors import HostError, internal
from host.inference.request import Tensor, read_bytes
from stub.wire.arena import (
    Arena,
    ArenaFull,
    ArenaReader,
    Block,
    BlockReferences,
    DroppedBlocks,
    collect_releases,
    create_arena_file,
)
from stub.wire.messages import INLINE_LIMIT, BlockRelease, CloseArena, OpenArena

HOST_ARENA = 0
"""Number of the host's own arena."""


class Region(Protocol):
    """Client-registered shared memory, which can hold tensors like an arena."""

    number: int

    def announcement(self) -> OpenArena:
        """The message that a stub gets before it gets blocks of this region."""

    def block(self, offset: int, size: int) -> Block:
        """A part of the region. Raises ValueError if it lies outside."""


class ArenaFile:
    """A stub's arena, as the host sees it. The file stays open while it has blocks in use."""

    def __init__(self, number: int, limit: int, on_closed: Callable[[int], None]) -> None:
        self.number = number
        self.limit = limit
        self._on_closed = on_closed
        self.fd = create_arena_file("pbhost-stub", limit)
        self.dropped: DroppedBlocks = deque()  # blocks to release in the stub
        self._drop_handler: Callable[[], None] | None = None
        self._reader = ArenaReader(self.fd, limit)

    @property
    def path(self) -> str:
        """A path by which processes of this user can open it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def block(self, offset: int, size: int) -> Block:
        """A block that the stub has written. Raises ValueError if it lies outside."""
        return Block(
            self.number, offset, size, self._reader.slice(offset, size), self._on_block_drop
        )

    def set_drop_handler(self, told: Callable[[], None] | None) -> None:
        """Sets the function to call when a block was dropped; None once the stub is gone."""
        self._drop_handler = told

    def _on_block_drop(self, arena: int, offset: int) -> None:
        if self._drop_handler is not None:
            self.dropped.append((arena, offset))
            self._drop_handler()

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)
            self._on_closed(self.number)


class ReceivedBlocks:
    """Blocks of an arena for tensors that are received, until they are passed on to a process.

    Slow clients must not take the room of complete requests: they get a quarter of the arena.
    """

    _PART = 4

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held = 0  # bytes
        self._sizes: dict[ReferenceType[Block], int] = {}
        self._gone: deque[int] = deque()  # sizes; a finaliser may run in any thread

    def reserve(self, size: int) -> tuple[Block, memoryview] | None:
        """Returns a block and its bytes to write; None if there is no room."""
        gone = self._gone
        while gone:
            self._held -= gone.popleft()
        if self._held + size > self._arena.limit // self._PART:
            return None
        bytes_to_write: list[memoryview] = []
        try:
            block = self._arena.write_with(size, bytes_to_write.append)
        except ArenaFull:
            return None
        self._sizes[ref(block, self._forget)] = size
        self._held += size
        return block, bytes_to_write[0]

    def exported(self, block: Block) -> None:
        """A process has been sent the block."""
        self._forget(ref(block))

    def _forget(self, block: ReferenceType[Block]) -> None:
        self._gone.append(self._sizes.pop(block, 0))


class Arenas:
    """`limit`: bytes that the tensors of one process may take. Raises OSError without memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.host_fd = create_arena_file("pbhost-host", limit)
        self.host = Arena(HOST_ARENA, self.host_fd, limit)
        self.received = ReceivedBlocks(self.host)
        self._numbers = itertools.count(HOST_ARENA + 1)
        self._files: dict[int, str] = {}
        self._regions: dict[int, Region] = {}
        self._loop = asyncio.get_running_loop()
        self.on_closed: list[Callable[[int], None]] = []

    def create_arena(self) -> ArenaFile:
        """Creates the arena of a new stub."""
        file = ArenaFile(next(self._numbers), self.limit, self._on_file_closed)
        self._files[file.number] = file.path
        return file

    def next_number(self) -> int:
        """A number that no arena has had."""
        return next(self._numbers)

    def add_region(self, region: Region) -> None:
        """Adds a region, which may hold tensors from now on."""
        self._regions[region.number] = region

    def remove_region(self, region: Region) -> None:
        """Removes a region that holds no tensor any more."""
        del self._regions[region.number]
        self._remove_arena(region.number)

    def region(self, number: int) -> Region | None:
        """The client's region with this number, if there is one."""
        return self._regions.get(number)

    def announcement(self, number: int) -> OpenArena:
        """The message that a stub gets before blocks of this arena. Raises KeyError."""
        region = self._regions.get(number)
        if region is not None:
            return region.announcement()
        return OpenArena(number, self._files[number], self.limit)

    def _on_file_closed(self, number: int) -> None:
        """Called when a file was closed, maybe by the garbage collector, in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._remove_arena, number)

    def _remove_arena(self, number: int) -> None:
        self._files.pop(number, None)
        for callback in list(self.on_closed):
            callback(number)

    def place_tensor(self, tensor: Tensor, most: int = INLINE_LIMIT) -> None:
        """Moves a tensor of more than `most` bytes to shared memory. Raises ArenaFull.

        The tensor is passed on by reference from here on, and its own bytes may be freed.
        """
        if not isinstance(tensor.owner, Block) and len(tensor.data) > most:
            block = self.host.write(memoryview(read_bytes(tensor.data)))
            tensor.data, tensor.owner = block.data, block

    def used_bytes(self) -> tuple[int, int]:
        """Bytes in use in the host's arena, and in those of all stubs."""
        return _allocated_bytes(self.host_fd), sum(map(_allocated_bytes, self._files.values()))

    def close(self) -> None:
        """Closes the host's arena; its memory is freed with the last block."""
        self.host.close()
        os.close(self.host_fd)


def _allocated_bytes(file: int | str) -> int:
    try:
        return os.stat(file).st_blocks * 512  # the unit of st_blocks is always 512 bytes
    except FileNotFoundError:  # the last block has just been released
        return 0


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

    Source: docs/reference/model-processes.md, "Options and shared memory".
    """
    return internal(
        "Failed to increase the shared memory pool size for key 'pbhost-host' to"
        f" {full.used + full.requested} bytes. Error: {full};"
        " raise --arena-byte-size or send smaller tensors"
    )
