"""The shared memory of a frontend process and of the core, as each end uses it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable

from host.frontend_processes.frontend_messages import WireTensor
from host.inference.request import SharedMemoryBytes, Tensor, copy_from_shared_memory
from host.instances.arenas import Arenas, ProcessMemory, ReceivedBlocks, ReleaseTimer
from stub.wire.arena import (
    Arena,
    ArenaReader,
    Block,
    BlockReferences,
    DroppedBlocks,
    collect_releases,
)
from stub.wire.messages import INLINE_ALWAYS, BlockRelease, CloseArena

_READER = "event loop"  # of the process, which gets all of its messages


class CoreMemory(ProcessMemory):
    """The blocks that the core and one frontend process hold of each other.

    `send_arena` passes the number, the size and a read-only descriptor of an arena to the process,
    before the first message that refers to it. `flush` sends the releases soon. `inline_limit`
    returns the bytes of tensors that the next message may contain.
    """

    def __init__(
        self,
        arenas: Arenas,
        send_arena: Callable[[int, int, int], None],
        close_arena: Callable[[CloseArena], None],
        flush: Callable[[], None],
        inline_limit: Callable[[], int],
    ) -> None:
        super().__init__(arenas, arenas.create_arena(), flush, close_arena, (_READER,))
        self._send_arena = send_arena
        self._inline_limit = inline_limit

    def decode_tensor(self, wire: WireTensor) -> Tensor:
        """Converts an input that lies in no region. Raises ValueError for an invalid reference."""
        if wire.data is not None:
            return Tensor(wire.name, wire.datatype, wire.shape, wire.data)
        if wire.arena != self._number:
            raise ValueError(f"a block of arena {wire.arena}, which is not that of the process")
        return self.decode_block(wire.name, wire.datatype, wire.shape, wire.offset, wire.size)

    def decode_block(
        self, name: str, datatype: str, shape: list[int], offset: int, size: int
    ) -> Tensor:
        """An input in the arena of the process. Raises ValueError if it lies outside."""
        block = self.arena.block(offset, size)
        return Tensor(name, datatype, shape, block.data, block)

    def encode_tensor(self, tensor: Tensor, outputs: int) -> WireTensor:
        """Converts one of `outputs` tensors; a large one to a reference, and exports its block.

        Raises ArenaFull, HostError if it cannot be read, or OSError.
        """
        name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
        data, block = tensor.data, tensor.owner
        if isinstance(block, Block) and isinstance(data, memoryview):
            return self._export_block(name, datatype, shape, block)
        size = len(data)
        if size <= INLINE_ALWAYS and not isinstance(block, Block):
            return WireTensor(name, datatype, shape, bytes(data))
        if not size:  # it is empty, or in memory of its client
            return WireTensor(name, datatype, shape, b"")
        tensor = copy_from_shared_memory(tensor)
        self._arenas.place_tensor(tensor, self._inline_limit() // outputs)
        block = tensor.owner
        if not isinstance(block, Block):
            return WireTensor(name, datatype, shape, bytes(tensor.data))
        return self._export_block(name, datatype, shape, block)

    def _export_block(self, name: str, datatype: str, shape: list[int], block: Block) -> WireTensor:
        """A reference to a block, which the process holds until it releases it."""
        if block.arena not in self._announced[_READER]:
            self._announce_arena(block.arena)
        self._exported.export_block(block)
        return WireTensor(name, datatype, shape, None, block.arena, block.offset, block.size)

    def cancel_export(self, tensors: Iterable[WireTensor]) -> None:
        """Reverts `encode_tensor`: the message with these tensors is not sent."""
        for wire in tensors:
            if wire.data is None:
                self._exported.release_block(wire.arena, wire.offset, 1)

    def _announce_arena(self, number: int) -> None:
        message = self._arenas.announcement(number)
        descriptor = os.open(message.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._send_arena(number, message.limit, descriptor)
        finally:
            os.close(descriptor)
        self._announced[_READER].add(number)


_TRIM_SECONDS = 2.0  # how long freed tensor memory stays warm


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
        self._received = ReceivedBlocks(self._own)
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
        self._received.exported(block)
        self._exported.export_block(block)
        return block.offset

    def reserve_block(self, size: int) -> tuple[Block, memoryview] | None:
        """As `ReceivedBlocks.reserve`."""
        return self._received.reserve(size)

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
