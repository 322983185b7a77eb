"""The core's end of the shared memory of one frontend process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from host.frontend_processes.messages import WireTensor
from host.inference.request import Tensor, copy_from_shared_memory
from host.instances.arenas import Arenas
from host.instances.process_memory import ProcessMemory
from stub.wire.arena import Block
from stub.wire.messages import CloseArena
from stub.wire.payload import INLINE_ALWAYS

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
