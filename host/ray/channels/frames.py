"""Frames of the connections between replicas: a header, the head of a message, and its tensors.

Heads are MessagePack. Calls of methods and their results are pickled, as Ray does it. Either end
reads them only after the handshake, from replicas of the same application.
"""

from __future__ import annotations

import asyncio
import enum
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from host.ray.channels.messages import Refusal, RequestHead, ResponseHead

_HEADER = struct.Struct("<IQB")  # bytes that follow, number of the call, kind
_LENGTH = struct.Struct("<I")
_MAX_FRAME = (1 << 32) - 1


class FrameKind(enum.IntEnum):
    """What a frame is. Clients send REQUEST, CANCEL and ACKNOWLEDGE."""

    REQUEST = 1
    CANCEL = 2
    ACKNOWLEDGE = 3
    """The client has read `RESPONSES_PER_ACKNOWLEDGEMENT` responses of the call."""
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


RESPONSE_WINDOW = 64
"""Responses of one call that may be on their way."""
RESPONSES_PER_ACKNOWLEDGEMENT = 16

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(tuple[RequestHead, list[int]]).decode
_decode_response = msgspec.msgpack.Decoder(tuple[ResponseHead | None, list[int]]).decode
_decode_refusal = msgspec.msgpack.Decoder(Refusal).decode


class FrameError(Exception):
    """The other side does not keep to the protocol."""


def encode_frame(kind: FrameKind, number: int) -> bytes:
    """A frame without contents."""
    return _HEADER.pack(0, number, kind)


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


def encode_pickled(kind: FrameKind, number: int, contents: object) -> bytes:
    """A CALL with the method and its arguments, or a RESULT."""
    encoded = pickle.dumps(contents, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(encoded), number, kind) + encoded


def decode_pickled(contents: bytes) -> Any:
    """What a CALL or a RESULT contains. Raises FrameError."""
    try:
        return pickle.loads(contents)
    except Exception as error:  # pickle raises many kinds
        raise FrameError(f"a call cannot be decoded: {error}") from error


def encode_refusal(number: int, refusal: Refusal) -> bytes:
    """A frame with an error."""
    encoded = _encode(refusal)
    return _HEADER.pack(len(encoded), number, FrameKind.REFUSAL) + encoded


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """The kind, the number of the call, and the contents. Raises as `readexactly`."""
    size, number, kind = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return kind, number, await reader.readexactly(size) if size else b""


def decode_request(contents: bytes) -> tuple[RequestHead, list[memoryview]]:
    """The head of a request, and its tensors. Raises FrameError."""
    try:
        encoded, tensors = _split(contents)
        head, sizes = _decode_request(encoded)
    except (msgspec.MsgspecError, struct.error) as error:
        raise FrameError(f"a request cannot be decoded: {error}") from error
    return head, _cut(tensors, sizes)


def decode_response(contents: bytes) -> tuple[ResponseHead | None, list[memoryview]]:
    """The head of a response, and its tensors. Raises FrameError."""
    try:
        encoded, tensors = _split(contents)
        head, sizes = _decode_response(encoded)
    except (msgspec.MsgspecError, struct.error) as error:
        raise FrameError(f"a response cannot be decoded: {error}") from error
    return head, _cut(tensors, sizes)


def decode_refusal(contents: bytes) -> Refusal:
    """The error. Raises FrameError."""
    try:
        return _decode_refusal(contents)
    except msgspec.MsgspecError as error:
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
