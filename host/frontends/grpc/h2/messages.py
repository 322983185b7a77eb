"""gRPC messages: framing inside of a stream's data, and compression."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import deque

from host.frontends.compression import decompress_in_steps
from host.frontends.grpc.h2.status import RpcError, StatusCode
from host.frontends.grpc.placed_message import MIN_PLACED_BYTES, MessagePlacer, ReserveBlock
from host.frontends.receive_memory import (
    OutOfReceiveMemory,
    Piece,
    ReceiveBudget,
    ReceiveBuffer,
    ReservedBytes,
)

PREFIX = struct.Struct(">BI")
"""The prefix of each message: whether it is compressed, and its length in bytes."""

ENCODINGS = {"gzip": 31, "deflate": zlib.MAX_WBITS}
"""Supported encodings, and the `wbits` that zlib needs for each."""

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
        "_reserve_block",
    )

    def __init__(
        self, max_size: int, budget: ReceiveBudget, reserve_block: ReserveBlock | None = None
    ) -> None:
        """`reserve_block`: where to place large tensors, of messages that are ModelInferRequests.

        Such a message may be a PlacedMessage.
        """
        self.messages: deque[ReceivedMessage] = deque()
        self.bytes_received = 0
        self._budget = budget
        self._max_size = max_size
        self._prefix = b""  # an incomplete prefix
        self._flag = 0
        self._missing = -1  # missing bytes of the current message; -1 between messages
        self._buffer: ReceiveBuffer | None = None  # of a message that arrives in pieces
        self._reserve_block = reserve_block

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
        reserve_block = self._reserve_block
        if reserve_block is None or self._flag:  # its tensors are compressed
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
        body = _compress(message, encoding)
    else:
        body = await asyncio.to_thread(_compress, message, encoding)
    if len(body) < len(message):
        return PREFIX.pack(1, len(body)), body
    return PREFIX.pack(0, len(message)), message


def _compress(message: bytes, encoding: str) -> bytes:
    engine = zlib.compressobj(wbits=ENCODINGS[encoding])
    return engine.compress(message) + engine.flush()
