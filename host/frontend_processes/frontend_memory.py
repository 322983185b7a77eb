"""The shared memory of a frontend process: its own arena, and blocks of other processes."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakSet

from host.frontend_processes.messages import WireTensor
from host.frontends.receive_memory import FilledMessage
from host.inference.request import SharedMemoryBytes, Tensor
from host.instances.process_memory import ReleaseTimer
from stub.wire.arena import (
    Arena,
    ArenaFull,
    ArenaReader,
    Block,
    BlockReferences,
    DroppedBlocks,
    collect_releases,
)
from stub.wire.messages import BlockRelease
from stub.wire.payload import INLINE_ALWAYS

_TRIM_SECONDS = 2.0  # how long freed tensor memory stays warm
_RECEIVED_PART = 4  # of the arena, for tensors that are being received
_NO_ARENA = -1


class RegionPlace(SharedMemoryBytes):
    """A place in shared memory of a client. Only the core knows the region, and can read it."""

    __slots__ = ("name", "offset", "size")

    def __init__(self, name: str, offset: int, size: int) -> None:
        self.name = name
        self.offset = offset
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        raise AssertionError("the core reads shared memory of clients")

    def read_part(self, begin: int, size: int) -> bytes:
        raise AssertionError("the core reads shared memory of clients")


class FrontendMemory:
    """The blocks that a frontend process and the core hold of each other.

    `read_arenas` receives the arenas that were announced by now. `flush` sends the releases soon.
    """

    def __init__(
        self,
        number: int,
        arena_fd: int,
        limit: int,
        read_arenas: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        self._own = Arena(number, arena_fd, limit)
        self._readers: dict[int, ArenaReader] = {number: ArenaReader(arena_fd, limit)}
        self._read_arenas = read_arenas
        self._exported = BlockReferences()
        self._received: WeakSet[Block] = WeakSet()  # not exported yet
        self._dropped: DroppedBlocks = deque()
        self._release_timer = ReleaseTimer(flush)
        self._loop = asyncio.get_running_loop()
        self._trim()

    def _trim(self) -> None:
        self._own.trim()
        self._timer = self._loop.call_later(_TRIM_SECONDS, self._trim)

    def open_arena(self, number: int, fd: int, limit: int) -> None:
        """Opens an arena of another process, and closes the descriptor. Raises OSError."""
        try:
            self._readers[number] = ArenaReader(fd, limit)
        finally:
            os.close(fd)

    def close_arena(self, number: int) -> None:
        """Closes an arena; its mapping ends with the last tensor in it."""
        self._readers.pop(number, None)

    def encode_tensor(self, tensor: Tensor, limit: int) -> WireTensor:
        """Converts an input; one of more than `limit` bytes is written to the arena.

        Raises ArenaFull.
        """
        data = tensor.data
        name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
        if isinstance(data, RegionPlace):
            return WireTensor(
                name, datatype, shape, None, 0, data.offset, data.size, region=data.name
            )
        content = self.encode_content(tensor, limit)
        if isinstance(content, bytes):
            return WireTensor(name, datatype, shape, content)
        return WireTensor(name, datatype, shape, None, self._own.number, content, len(data))

    def encode_content(self, tensor: Tensor, limit: int) -> bytes | int:
        """Converts the content of an input: its bytes, or the offset of its block in the arena.

        Raises ArenaFull.
        """
        data = tensor.data
        assert not isinstance(data, SharedMemoryBytes)
        if len(data) <= max(INLINE_ALWAYS, limit):
            return bytes(data)
        block = tensor.owner
        if not isinstance(block, Block) or block.arena != self._own.number:
            block = self._own.write(memoryview(data))
        self._received.discard(block)
        self._exported.export_block(block)
        return block.offset

    def reserve_block(self, size: int) -> tuple[Block, memoryview]:
        """Reserves a block for a tensor that is being received, and returns its bytes to write.

        Slow clients must not take the room of complete requests: they get a quarter of the arena,
        and memory of this process beyond that. Raises MemoryError.
        """
        received = self._received
        if size + sum(block.size for block in received) <= self._own.limit // _RECEIVED_PART:
            bytes_to_write: list[memoryview] = []
            try:
                block = self._own.write_with(size, bytes_to_write.append)
            except ArenaFull:
                pass
            else:
                received.add(block)
                return block, bytes_to_write[0]
        message = FilledMessage(size)
        data = memoryview(message.finish())
        return Block(_NO_ARENA, 0, size, data, lambda *_: None), message.memory

    def cancel_export(self, tensors: Iterable[WireTensor]) -> None:
        """Reverts `encode_tensor`: the message with these tensors was not sent."""
        for wire in tensors:
            if wire.data is None and wire.region is None:
                self._exported.release_block(wire.arena, wire.offset, 1)

    def cancel_content_export(self, contents: Iterable[bytes | int]) -> None:
        """Reverts `encode_content`: the message with these contents was not sent."""
        for content in contents:
            if isinstance(content, int):
                self._exported.release_block(self._own.number, content, 1)

    def decode_tensor(self, wire: WireTensor) -> Tensor:
        """Converts an output. Raises KeyError or ValueError for an invalid reference."""
        if wire.data is not None:
            return Tensor(wire.name, wire.datatype, wire.shape, wire.data)
        reader = self._readers.get(wire.arena)
        if reader is None:
            self._read_arenas()
            reader = self._readers[wire.arena]
        view = reader.slice(wire.offset, wire.size)
        block = Block(wire.arena, wire.offset, wire.size, view, self._on_drop)
        return Tensor(wire.name, wire.datatype, wire.shape, view, block)

    def _on_drop(self, arena: int, offset: int) -> None:
        self._dropped.append((arena, offset))
        self._release_timer.schedule()

    def release_blocks(self, message: BlockRelease) -> None:
        """Releases blocks that the core has returned. Raises KeyError for unknown blocks."""
        self._exported.release_blocks(message)

    def collect_releases(self) -> BlockRelease | None:
        """A message with the blocks that this process has released, or None."""
        return collect_releases(self._dropped)
