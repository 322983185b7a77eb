"""gRPC messages and statuses: framing inside of a stream's data, compression, header blocks."""

from __future__ import annotations

import asyncio
import enum
import functools
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterable

from host.frontends.compression import compress_parts, decompress_in_steps
from host.frontends.grpc.protobuf_wire import MessagePlacer
from host.frontends.receive_memory import (
    MIN_PLACED_BYTES,
    OutOfReceiveMemory,
    Piece,
    ReceiveBudget,
    ReceiveBuffer,
    ReservedBytes,
)

_LITERAL = b"\x00"  # HPACK: a literal field without indexing
_STATUS_200 = b"\x88"
_STATUS = b"\x08"  # HPACK: `:status` from the static table, with a literal value
_CONTENT_TYPE = b"\x0f\x10"  # HPACK: `content-type` from the static table, with a literal value
_UNSAFE = re.compile(rb"[^ -$&-~]|\A | \Z")  # proxies cut spaces at the ends of a field


class StatusCode(enum.IntEnum):
    """The statuses that the engine itself sends."""

    OK = 0
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(Exception):
    """Ends a call with a status of the engine itself."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def _hpack_string(value: bytes) -> bytes:
    """Encodes a string in HPACK, without Huffman coding."""
    length = len(value)
    if length < 127:
        return bytes((length,)) + value
    head, length = bytearray((127,)), length - 127
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + value


def hpack_field(name: str, value: bytes) -> bytes:
    """Encodes a header field in HPACK."""
    return _LITERAL + _hpack_string(name.encode()) + _hpack_string(value)


RESPONSE_HEADERS = _STATUS_200 + _CONTENT_TYPE + b"\x10application/grpc"
"""The header block of a response."""

ACCEPT_ENCODING = hpack_field("grpc-accept-encoding", b"identity,deflate,gzip")


@functools.cache
def response_headers(encoding: str) -> bytes:
    """Returns the header block of a response whose messages may be compressed."""
    return RESPONSE_HEADERS + hpack_field("grpc-encoding", encoding.encode())


def trailers(status: int, message: str = "", max_bytes: int = 0) -> bytes:
    """Returns the trailers of a response; cuts the message to `max_bytes` bytes (0: no limit)."""
    block = hpack_field("grpc-status", b"%d" % status)
    if message:
        block += hpack_field("grpc-message", percent_encode(message, max_bytes))
    return block


def http_error_headers(status: int) -> bytes:
    """Returns the header block that answers a request that is not gRPC."""
    return _STATUS + _hpack_string(b"%d" % status)


def percent_encode(message: str, max_bytes: int = 0) -> bytes:
    """Percent-encodes a message, cut to at most `max_bytes` bytes (0: no limit)."""
    if max_bytes:
        message = message[:max_bytes]  # of a long text, only this part can be needed
    data = message.encode("utf-8", "replace")
    encoded = _UNSAFE.sub(_escape, data)
    while max_bytes and len(encoded) > max_bytes:
        # Cut the text, not its escapes: a byte becomes up to three.
        excess = (len(encoded) - max_bytes + 2) // 3
        data = data[: len(data) - excess].decode("utf-8", "ignore").encode()
        encoded = _UNSAFE.sub(_escape, data)
    return encoded


def _escape(found: re.Match[bytes]) -> bytes:
    return b"%%%02X" % found[0][0]


PREFIX = struct.Struct(">BI")
"""The prefix of each message: whether it is compressed, and its length in bytes."""

ENCODINGS = {"gzip": 31, "deflate": zlib.MAX_WBITS}
"""Supported encodings, and the `wbits` that zlib needs for each."""

INTERPRETED_FIELDS = frozenset(
    (b":method", b":path", b"te", b"content-type", b"grpc-encoding", b"grpc-accept-encoding")
)
"""The fields that say how a request is handled, but for its timeout and length."""

TIMEOUT_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
"""Seconds by the units of `grpc-timeout`."""

_TIMEOUT = re.compile(b"([0-9]{1,8})([HMSmun])").fullmatch


def read_timeout(value: bytes) -> float | None:
    """The seconds of a `grpc-timeout`, or None if it is invalid."""
    found = _TIMEOUT(value)
    return None if found is None else int(found[1]) * TIMEOUT_UNITS[found[2]]


_MIN_THREAD_BYTES = 1 << 18  # bytes; compressing more would block the event loop for ms

ReceivedMessage = tuple[int, bytes, ReservedBytes | None]
"""Whether it is compressed, its bytes, and its reserved memory; None if it came in one piece."""


class MessageReader:
    """Assembles messages from the pieces of a stream's data.

    Attributes:
        messages: Complete messages.
        bytes_received: The number of bytes of all pieces.
    """

    __slots__ = (
        "messages",
        "bytes_received",
        "_budget",
        "_max_size",
        "_prefix",
        "_flag",
        "_missing",
        "_buffer",
        "_places_tensors",
    )

    def __init__(self, max_size: int, budget: ReceiveBudget, places_tensors: bool = False) -> None:
        """`places_tensors`: messages are ModelInferRequests; large ones may be PlacedMessages."""
        self.messages: deque[ReceivedMessage] = deque()
        self.bytes_received = 0
        self._budget = budget
        self._max_size = max_size
        self._prefix = b""  # an incomplete prefix
        self._flag = 0
        self._missing = -1  # missing bytes of the current message; -1 between messages
        self._buffer: ReceiveBuffer | None = None  # of a message that arrives in pieces
        self._places_tensors = places_tensors

    @property
    def at_message_boundary(self) -> bool:
        """Whether no message is incomplete."""
        return self._missing < 0 and not self._prefix

    def feed(self, piece: Piece) -> None:
        """Reads a piece of data; complete messages go to `messages`.

        Raises RpcError RESOURCE_EXHAUSTED if a message is too large, or if there is no memory for
        it, before it is stored.
        """
        end = len(piece)
        self.bytes_received += end
        # Nearly always, one piece is one message.
        if end >= PREFIX.size and self.at_message_boundary:
            flag, length = PREFIX.unpack_from(piece)
            if length == end - PREFIX.size:
                check_message_size(length, self._max_size)
                self.messages.append((flag, bytes(piece[PREFIX.size :]), None))
                return
        try:
            self._read_parts(piece)
        except OutOfReceiveMemory as error:
            raise RpcError(StatusCode.RESOURCE_EXHAUSTED, error.message) from None

    def add_messages(self, messages: Iterable[ReceivedMessage], size: int) -> None:
        """Adds whole messages, of `size` bytes with their prefixes, at a message boundary."""
        self.bytes_received += size
        self.messages.extend(messages)

    def _read_parts(self, piece: Piece) -> None:
        position, end = 0, len(piece)
        while position < end or self._missing == 0:
            if self._missing < 0:
                missing = PREFIX.size - len(self._prefix)
                head = self._prefix + bytes(piece[position : position + missing])
                position += missing
                if len(head) < PREFIX.size:
                    self._prefix = head
                    return
                self._prefix = b""
                self._flag, self._missing = PREFIX.unpack(head)
                check_message_size(self._missing, self._max_size)
            part = piece[position : position + self._missing]
            position += len(part)
            buffer = self._buffer
            if len(part) < self._missing:
                if buffer is None:
                    buffer = self._buffer = self._new_buffer()
                buffer.append(part)
                self._missing -= len(part)
                continue
            if buffer is None:
                self.messages.append((self._flag, bytes(part), None))
            else:
                buffer.append(part)
                self.messages.append((self._flag, buffer.finish(), buffer.reserved))
            self._buffer = None
            self._missing = -1

    def _new_buffer(self) -> ReceiveBuffer:
        reserve_block = self._budget.reserve_block
        if (
            reserve_block is None or not self._places_tensors or self._flag
        ):  # its tensors are compressed
            return ReceiveBuffer(self._budget, self._missing)
        return ReceiveBuffer(
            self._budget,
            self._missing,
            lambda size: MessagePlacer(size, reserve_block),
            MIN_PLACED_BYTES,
        )

    def discard(self) -> None:
        """Drops all messages and releases their memory."""
        self.messages.clear()
        if self._buffer is not None:
            self._buffer.discard()


def check_message_size(size: int, max_size: int) -> None:
    """Raises RpcError RESOURCE_EXHAUSTED if a message is too large."""
    if size > max_size:
        raise RpcError(
            StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {max_size})",
        )


async def decompress(
    message: bytes, encoding: str, max_size: int, reserved: ReservedBytes
) -> bytes:
    """Decompresses a message, whose memory is counted in `reserved`.

    Raises RpcError: INTERNAL if the message is damaged or `encoding` is not known,
    RESOURCE_EXHAUSTED if the result is larger than `max_size` bytes, or if there is no memory for
    it.
    """
    if encoding not in ENCODINGS:
        raise RpcError(
            StatusCode.INTERNAL, "a message is compressed, but grpc-encoding does not say how"
        )
    in_thread = len(message) >= _MIN_THREAD_BYTES // 16
    try:
        plain, complete = await decompress_in_steps(
            message, ENCODINGS[encoding], max_size, reserved, in_thread
        )
    except zlib.error as error:
        raise RpcError(StatusCode.INTERNAL, f"a message is not {encoding}: {error}") from None
    except OutOfReceiveMemory as error:
        raise RpcError(StatusCode.RESOURCE_EXHAUSTED, error.message) from None
    check_message_size(len(plain), max_size)
    if not complete:
        raise RpcError(StatusCode.INTERNAL, f"a message is not {encoding}: its end is missing")
    return plain


async def compress(message: bytes, encoding: str) -> tuple[bytes, bytes]:
    """Returns prefix and body of a message; compressed only if that makes it smaller."""
    if len(message) < _MIN_THREAD_BYTES:
        body = compress_parts([message], encoding)
    else:
        body = await asyncio.to_thread(compress_parts, [message], encoding)
    if len(body) < len(message):
        return PREFIX.pack(1, len(body)), body
    return PREFIX.pack(0, len(message)), message
