"""The limits on the fields of a ModelInferRequest.

Decoding a field takes microseconds in the event loop, and a message of 2 GiB has room for 1000
million fields. The check of the limits reads tags and lengths only, and stops at the first excess.
The limits are in docs/reference/grpc.md, "ModelInferResponse".
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError, invalid_argument
from host.frontends.grpc.protobuf_wire import LENGTH_DELIMITED, MAX_FIELDS, read_varint

MIN_CHECKED_BYTES = 2 * MAX_FIELDS
"""A message below this size cannot have too many fields, as each of them takes two bytes."""

_UNKNOWN = "unknown"
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _FIXED32 = 0, 1, 5

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
        if wire_type == LENGTH_DELIMITED:
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
