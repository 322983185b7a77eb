"""The wire format of protobuf: varints, limits on fields, and large tensors in shared memory.

Decoding a field takes microseconds in the event loop, and a message of 2 GiB has room for 1000
million fields. The check of the limits reads tags and lengths only, and stops at the first excess.
The limits are in docs/reference/grpc.md, "ModelInferResponse".

Large tensors of a ModelInferRequest are written to shared memory as they are received. They are not
joined to a message and copied out of it again. Each begins a block, so that it is aligned for any
library.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError, invalid_argument
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

MIN_CHECKED_BYTES = 2 * MAX_FIELDS
"""A message below this size cannot have too many fields, as each of them takes two bytes."""

_UNKNOWN = "unknown"
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5

TensorCounts = Callable[[str, str], tuple[int, int]]
"""Returns the number of inputs and of outputs of a model, by its name and version; (0, 0) if it is
unknown."""


def no_tensor_counts(model: str, version: str) -> tuple[int, int]:
    """Returns no counts, as of a model that is unknown."""
    return 0, 0


@dataclass(frozen=True)
class _MessageType:
    """Names of fields, and the types of sub-messages, by field number.

    `packed`: fields with several varints in one field, which are dimensions.
    Elements of typed contents have no limit here, as the shape of their tensor gives their number.
    """

    name: str
    fields: Mapping[int, str]
    messages: dict[int, _MessageType] = field(default_factory=dict)
    packed: set[int] = field(default_factory=set)


def _message_type(descriptor: Descriptor) -> _MessageType:
    found = _MessageType(
        descriptor.name,
        {number: entry.name for number, entry in descriptor.fields_by_number.items()},
    )
    for number, entry in descriptor.fields_by_number.items():
        if entry.message_type is not None and entry.name != "contents":
            found.messages[number] = _message_type(entry.message_type)
        if entry.name == "shape":
            found.packed.add(number)
    return found


_REQUEST = _message_type(pb.ModelInferRequest.DESCRIPTOR)
_NUMBERS = {name: number for number, name in _REQUEST.fields.items()}
_MODEL_NAME, _MODEL_VERSION = _NUMBERS["model_name"], _NUMBERS["model_version"]
_INPUTS = (_NUMBERS["inputs"], _NUMBERS["raw_input_contents"])
_OUTPUTS = _NUMBERS["outputs"]


def check_field_counts(
    data: bytes,
    tensor_counts: TensorCounts = no_tensor_counts,
    placed: Container[int] = (),
) -> None:
    """Raises HostError INVALID_ARG if the message has too many fields of one name.

    `placed`: the positions in `data` of fields whose content is elsewhere. A message that is not
    valid protobuf passes, as its decoder reports that.
    """
    try:
        _check_message(data, 0, len(data), _REQUEST, tensor_counts, placed)
    except (IndexError, UnicodeDecodeError):
        pass  # the message ends inside of a field, or its model has no name


def _check_message(
    data: bytes,
    position: int,
    end: int,
    kind: _MessageType,
    tensor_counts: TensorCounts,
    placed: Container[int] = (),
) -> None:
    counts: dict[int, int] = {}
    limits: dict[int, int] = {}
    model: dict[int, bytes] = {}
    while position < end:
        tag = data[position]
        position += 1
        if tag > 127:
            tag, position = read_varint(data, position - 1)
        number, wire_type = tag >> 3, tag & 7
        if number not in kind.fields:
            number = 0
        count = counts[number] = counts.get(number, 0) + 1
        if count > MAX_FIELDS and count > limits.get(number, 0):
            if kind is _REQUEST and number not in limits:
                limits |= _tensor_limits(model, tensor_counts)
            if count > limits.get(number, 0):
                raise _too_many_fields(kind, number, max(MAX_FIELDS, limits.get(number, 0)))
        if wire_type == _LENGTH_DELIMITED:
            length = data[position]
            position += 1
            if length > 127:
                length, position = read_varint(data, position - 1)
            if placed and position in placed:
                continue
            start, position = position, position + length
            if position > end:
                return
            if number in kind.packed and length > MAX_FIELDS * _MAX_VARINT_BYTES:
                raise _too_many_fields(kind, number, MAX_FIELDS)
            if length >= MIN_CHECKED_BYTES and number in kind.messages:
                _check_message(data, start, position, kind.messages[number], tensor_counts)
            elif kind is _REQUEST and number in (_MODEL_NAME, _MODEL_VERSION):
                model[number] = data[start:position]
        elif wire_type == _VARINT:
            while data[position] > 127:
                position += 1
            position += 1
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        # The fields of a group (3 and 4) count as fields of the message around it.


def _tensor_limits(model: Mapping[int, bytes], tensor_counts: TensorCounts) -> dict[int, int]:
    inputs, outputs = tensor_counts(
        model.get(_MODEL_NAME, b"").decode(), model.get(_MODEL_VERSION, b"").decode()
    )
    return {**dict.fromkeys(_INPUTS, inputs), _OUTPUTS: outputs}


def _too_many_fields(kind: _MessageType, number: int, limit: int) -> HostError:
    return invalid_argument(
        f"expected at most {limit} '{kind.fields.get(number, _UNKNOWN)}' fields in {kind.name},"
        " but got more"
    )


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
            usual = byte < 128 and byte & 7 == _LENGTH_DELIMITED and self._fields <= MAX_FIELDS
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
        if tag == _RAW_TAG and MIN_PLACED_BYTES < length <= self._left:
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
