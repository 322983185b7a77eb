"""A ModelInferRequest whose large tensors are written to shared memory as they are received.

The tensors are not joined to a message and copied out of it again. Each begins a block, so that it
is aligned for any library.
"""

from __future__ import annotations

from collections.abc import Callable

from tritonclient.grpc import service_pb2 as pb

from host.frontends.grpc.protobuf_wire import MAX_FIELDS
from host.frontends.receive_memory import FilledMessage, Piece
from stub.wire.arena import Block

ReserveBlock = Callable[[int], tuple[Block, memoryview]]
"""Reserves a block, of shared memory if there is room; returns it and its bytes to write.

Raises MemoryError."""

MIN_PLACED_BYTES = 1 << 16
"""A smaller tensor is not placed, as it may be sent to its model in a message."""

_RAW_TAG = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | 2
_LENGTH_DELIMITED = 2
_MAX_LENGTH_SHIFT = 28  # of a varint of five bytes


class PlacedMessage(bytes):
    """The bytes of a message without the content of some fields, which is in `blocks`.

    The keys of `blocks` are positions in these bytes: where the content would be.
    """

    blocks: dict[int, Block]

    def whole(self) -> bytes:
        """The whole message."""
        parts: list[Piece] = []
        start = 0
        for position, block in self.blocks.items():
            parts += [self[start:position], block.data]
            start = position
        return b"".join([*parts, self[start:]])


class MessagePlacer:
    """Takes the pieces of a message of `size` bytes, as they arrive.

    Fields that are not large raw tensors are kept; their content is not looked at. A message with
    more than 2048 fields is kept from there on, as reading each costs a microsecond.
    """

    def __init__(self, size: int, reserve: ReserveBlock) -> None:
        """Raises MemoryError."""
        self._reserve = reserve
        self._left = size  # bytes of the message that have not arrived
        self._rest = FilledMessage(size)  # the whole message, if no tensor is placed
        self._blocks: dict[int, Block] = {}
        self._view = memoryview(b"")  # what is left to write of the tensor that arrives now
        self._kept = 0  # bytes that are left of the field that arrives now
        self._fields = 0
        self._tag = -1  # of the field whose length comes now
        self._length = self._shift = 0

    def append(self, part: Piece | bytearray) -> None:
        """Takes the next piece. Raises MemoryError."""
        data = memoryview(part)
        while data:
            view = self._view
            if view:
                size = min(len(view), len(data))
                view[:size] = data[:size]
                self._view = view[size:]
            elif self._kept:
                size = min(self._kept, len(data))
                self._rest.append(data[:size])
                self._kept -= size
            else:
                size = 1
                self._rest.append(data[:1])
                self._read_header(data[0])
            self._left -= size
            data = data[size:]

    def _read_header(self, byte: int) -> None:
        """Reads a byte of a field's tag or length."""
        if self._tag < 0:
            self._tag, self._length, self._shift = byte, 0, 0
            self._fields += 1
            if byte > 127 or byte & 7 != _LENGTH_DELIMITED or self._fields > MAX_FIELDS:
                self._kept = self._left  # no usual request; all the rest is kept
            return
        self._length |= (byte & 127) << self._shift
        self._shift += 7
        if byte > 127:
            if self._shift > _MAX_LENGTH_SHIFT:
                self._kept = self._left
            return
        length, self._kept = self._length, self._length
        if self._tag == _RAW_TAG and MIN_PLACED_BYTES < length < self._left:
            self._blocks[self._rest.size], self._view = self._reserve(length)
            self._kept = 0
        self._tag = -1

    def finish(self) -> bytes:
        """The message: with its blocks, if some tensors were placed."""
        if not self._blocks:
            return self._rest.finish()
        message = PlacedMessage(self._rest.memory[: self._rest.size])
        message.blocks = self._blocks
        return message
