"""The wire format of protobuf: varints, and large tensors in shared memory.

Large tensors of a ModelInferRequest are written to shared memory as they are received. They are not
joined to a message and copied out of it again. Each begins a block, so that it is aligned for any
library.

Connections, also those of the load generator, need no message classes of protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence

from host.frontends.receive_memory import MIN_PLACED_BYTES, Piece, Placer, ReserveBlock
from stub.wire.arena import Block

LONGEST_LENGTH = 5
"""Bytes of the longest varint that is the length of a field."""

_LONGEST = 10


def read_varint(data: Sequence[int], position: int, most: int = _LONGEST) -> tuple[int, int]:
    """Reads a varint of at most `most` bytes; returns it, and its end. Raises IndexError."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift >= 7 * most:
            raise IndexError(position)


def encode_varint(value: int) -> bytes:
    """Encodes a number that is not negative."""
    if value < 128:
        return SINGLE_BYTES[value]
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


SINGLE_BYTES = tuple(bytes((value,)) for value in range(128))
"""The varints of one byte."""


MAX_FIELDS = 2048
"""The maximum number of fields of each name in a message. For inputs and outputs, a model that has
more of them raises it."""

LENGTH_DELIMITED = 2
"""The type of fields with a length."""

RAW_TAG = 7 << 3 | LENGTH_DELIMITED
"""The tag of `raw_input_contents` in a ModelInferRequest."""

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


class MessagePlacer(Placer):
    """Takes the bytes of a message of `size` bytes, as they arrive.

    Fields that are not large raw tensors are kept; their content is not looked at. A message with
    more than 2048 fields is kept from there on, as reading each costs a microsecond.
    """

    def __init__(self, size: int, reserve: ReserveBlock) -> None:
        """Raises MemoryError."""
        super().__init__(size, reserve)
        self._blocks: dict[int, Block] = {}
        self._fields = 0
        self._in_header = False  # the last byte is one of the tag or length of a field
        self._tag = -1  # of the field whose length comes now
        self._length = self._shift = 0
        self._begin_part()

    def _begin_part(self) -> None:
        if self._in_header:
            self._read_header(self._rest.memory[self._rest.size - 1])
        else:
            self._in_header = True
            self._keep(1)

    def _read_header(self, byte: int) -> None:
        """Reads a byte of a field's tag or length, and says what follows."""
        if self._tag < 0:
            self._tag, self._length, self._shift = byte, 0, 0
            self._fields += 1
            # No usual request otherwise; all the rest is kept.
            usual = byte < 128 and byte & 7 == LENGTH_DELIMITED and self._fields <= MAX_FIELDS
            self._keep(1 if usual else self._left)
            return
        self._length |= (byte & 127) << self._shift
        self._shift += 7
        if byte > 127:
            self._keep(1 if self._shift <= _MAX_LENGTH_SHIFT else self._left)
            return
        self._in_header = False
        tag, self._tag = self._tag, -1
        position, length = self._rest.size, self._length
        if tag == RAW_TAG and MIN_PLACED_BYTES < length <= self._left:
            block = self._place(length)
            if block is not None:
                self._blocks[position] = block
        else:
            self._keep(min(length, self._left))

    def finish(self) -> bytes:
        """The message: with its blocks, if some tensors were placed."""
        if not self._blocks:
            return self._rest.finish()
        message = PlacedMessage(self._rest.memory[: self._rest.size])
        message.blocks = self._blocks
        return message
