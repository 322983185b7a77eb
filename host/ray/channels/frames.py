"""Frames of the connections between replicas: a header, the head of a message, and its tensors.

Heads, calls of methods and their results are MessagePack. An RPC is carried as the client sent it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from host.frontends.forwarding import Header
from host.ray.channels.messages import Refusal, RequestHead, ResponseHead

_HEADER = struct.Struct("<IQB")  # bytes that follow, number of the call, kind
_LENGTH = struct.Struct("<I")
_MAX_FRAME = (1 << 32) - 1


class FrameKind(enum.IntEnum):
    """What a frame is. Clients send REQUEST, RPC, CALL, CANCEL and ACKNOWLEDGE."""

    REQUEST = 1
    CANCEL = 2
    ACKNOWLEDGE = 3
    """The client has read responses of the call; the contents say how many."""
    TAKEN = 4
    """All calls up to this number have reached the server."""
    RESPONSE = 5
    LAST_RESPONSE = 6
    REFUSAL = 7
    """The call ends with an error."""
    NOT_TAKEN = 8
    """The server stops and has not begun the call."""
    GOODBYE = 9
    """The server stops: the client sends no new calls."""
    CALL = 10
    """The call of a method; the answer is a RESULT."""
    RESULT = 11
    RPC = 12
    """A ModelInfer of a client; the answer is an RPC_RESPONSE."""
    RPC_RESPONSE = 13


RESPONSE_WINDOW = 64
"""Responses of one call that may be on their way."""
ACKNOWLEDGED_RESPONSES, ACKNOWLEDGED_BYTES = 16, 1 << 20
"""Responses, or bytes of them, that a client has read before it acknowledges them."""

Frame = tuple[int, int, bytes]
"""The kind, the number of the call, and the contents."""

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(tuple[RequestHead, list[int]]).decode
_decode_response = msgspec.msgpack.Decoder(tuple[ResponseHead | None, list[int]]).decode
_decode_refusal = msgspec.msgpack.Decoder(Refusal).decode
_decode_call = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode
_decode_metadata = msgspec.msgpack.Decoder(list[tuple[Any, Any]]).decode

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, struct.error)
"""What is raised for contents that are no such message: lists may be too deep, too."""


class FrameError(Exception):
    """The other side does not keep to the protocol."""


def encode_frame(kind: FrameKind, number: int) -> bytes:
    """A frame without contents."""
    return _HEADER.pack(0, number, kind)


def encode_contents(kind: FrameKind, number: int, contents: bytes) -> bytes:
    """A frame with contents that are encoded already."""
    return _HEADER.pack(len(contents), number, kind) + contents


def encode_message(kind: FrameKind, number: int, head: object, buffers: Sequence[Any]) -> bytes:
    """A frame with the head of a message and the buffers of its tensors.

    Raises FrameError if it is larger than 4 GiB.
    """
    encoded = _encode((head, [len(buffer) for buffer in buffers]))
    size = _LENGTH.size + len(encoded) + sum(map(len, buffers))
    if size > _MAX_FRAME:
        raise FrameError(f"a message of {size} bytes is larger than a frame ({_MAX_FRAME})")
    header = _HEADER.pack(size, number, kind)
    return b"".join([header, _LENGTH.pack(len(encoded)), encoded, *buffers])


def encode_call(number: int, name: str, arguments: tuple[Any, ...]) -> bytes:
    """The call of a method. Raises TypeError for an argument that MessagePack does not have."""
    return encode_contents(FrameKind.CALL, number, _encode((name, arguments)))


def decode_call(contents: bytes) -> tuple[str, msgspec.Raw]:
    """The name of a method, and its encoded arguments. Raises FrameError."""
    try:
        return _decode_call(contents)
    except DECODE_ERRORS as error:
        raise FrameError(f"a call cannot be decoded: {error}") from error


def encode_result(number: int, result: object) -> bytes:
    """The result of a call. Raises TypeError if MessagePack does not have it."""
    return encode_contents(FrameKind.RESULT, number, _encode(result))


def encode_rpc(number: int, message: bytes, metadata: Sequence[Header]) -> bytes:
    """A ModelInfer with the metadata of the client."""
    encoded = _encode(metadata)
    header = _HEADER.pack(_LENGTH.size + len(encoded) + len(message), number, FrameKind.RPC)
    return b"".join([header, _LENGTH.pack(len(encoded)), encoded, message])


def decode_rpc(contents: bytes) -> tuple[bytes, list[Header]]:
    """The message of a ModelInfer, and the metadata. Raises FrameError."""
    try:
        encoded, message = _split(contents)
        return bytes(message), _decode_metadata(encoded)
    except DECODE_ERRORS as error:
        raise FrameError(f"an RPC cannot be decoded: {error}") from error


def encode_acknowledgement(number: int, count: int) -> bytes:
    """A frame that says how many responses the client has read since the last one."""
    return encode_contents(FrameKind.ACKNOWLEDGE, number, _LENGTH.pack(count))


def decode_acknowledgement(contents: bytes) -> int:
    """How many responses the client has read. Raises FrameError."""
    if len(contents) != _LENGTH.size:
        raise FrameError(f"an acknowledgement has {len(contents)} bytes")
    (count,) = _LENGTH.unpack(contents)
    return int(count)


def encode_refusal(number: int, refusal: Refusal) -> bytes:
    """A frame with an error."""
    return encode_contents(FrameKind.REFUSAL, number, _encode(refusal))


class FrameReader:
    """Takes what a connection receives apart."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that are complete with `data`; it must be exhausted."""
        received = self._received
        received += data
        start = 0
        while start + _HEADER.size <= len(received):
            size, number, kind = _HEADER.unpack_from(received, start)
            end = start + _HEADER.size + size
            if end > len(received):
                break
            with memoryview(received) as view:
                contents = bytes(view[start + _HEADER.size : end])
            yield kind, number, contents
            start = end
        del received[:start]


def decode_request(contents: bytes) -> tuple[RequestHead, list[memoryview]]:
    """The head of a request, and its tensors. Raises FrameError."""
    try:
        encoded, tensors = _split(contents)
        head, sizes = _decode_request(encoded)
    except DECODE_ERRORS as error:
        raise FrameError(f"a request cannot be decoded: {error}") from error
    return head, _cut(tensors, sizes)


def decode_response(contents: bytes) -> tuple[ResponseHead | None, list[memoryview]]:
    """The head of a response, and its tensors. Raises FrameError."""
    try:
        encoded, tensors = _split(contents)
        head, sizes = _decode_response(encoded)
    except DECODE_ERRORS as error:
        raise FrameError(f"a response cannot be decoded: {error}") from error
    return head, _cut(tensors, sizes)


def decode_refusal(contents: bytes) -> Refusal:
    """The error. Raises FrameError."""
    try:
        return _decode_refusal(contents)
    except DECODE_ERRORS as error:
        raise FrameError(f"an error cannot be decoded: {error}") from error


def _split(contents: bytes) -> tuple[memoryview, memoryview]:
    view = memoryview(contents)
    (length,) = _LENGTH.unpack_from(view)
    start = _LENGTH.size + length
    return view[_LENGTH.size : start], view[start:]


def _cut(tensors: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    if sum(sizes) != len(tensors):
        raise FrameError(f"expected {sum(sizes)} bytes of tensors, got {len(tensors)}")
    parts, start = [], 0
    for size in sizes:
        parts.append(tensors[start : start + size])
        start += size
    return parts
