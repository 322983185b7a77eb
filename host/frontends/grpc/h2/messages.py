"""gRPC messages: framing inside of a stream's data, and compression."""

from __future__ import annotations

import asyncio
import ctypes
import struct
import zlib
from collections import deque

from host.frontends.grpc.h2.reader import Piece
from host.frontends.grpc.h2.status import RpcError, StatusCode

PREFIX = struct.Struct(">BI")
"""The prefix of each message: whether it is compressed, and its length in bytes."""

ENCODINGS = {"gzip": 31, "deflate": zlib.MAX_WBITS}
"""Supported encodings, and the `wbits` that zlib needs for each."""

_MIN_UNJOINED_BYTES = 4096  # bytes; smaller pieces are joined in a buffer
_MIN_FILLED_BYTES = 16 << 20  # bytes; joining a smaller message takes a few milliseconds at most
_MIN_THREAD_BYTES = 1 << 18  # bytes; compressing more would block the event loop for ms


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)


class _FilledMessage:
    """A new bytes object that is filled piece by piece before it is used.

    Joining the pieces of a large message would hold up the event loop: for 64 MiB, 30 ms. Python's
    C API allows filling an object that PyBytes_FromStringAndSize(NULL, size) has returned.
    """

    __slots__ = ("message", "_memory", "_filled")

    def __init__(self, size: int) -> None:
        self.message: bytes = _new_bytes(None, size)
        address = _address(self.message)
        self._memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        self._filled = 0

    def append(self, part: Piece | bytearray) -> None:
        """Copies the next piece."""
        end = self._filled + len(part)
        self._memory[self._filled : end] = part
        self._filled = end


class MessageReader:
    """Assembles messages from the pieces of a stream's data."""

    __slots__ = (
        "messages",
        "bytes_received",
        "_max_size",
        "_prefix",
        "_flag",
        "_missing",
        "_received",
        "_chunks",
        "_filled",
    )

    def __init__(self, max_size: int) -> None:
        self.messages: deque[tuple[int, bytes]] = deque()  # (compressed, message)
        self.bytes_received = 0
        self._max_size = max_size
        self._prefix = b""  # an incomplete prefix
        self._flag = 0
        self._missing = -1  # missing bytes of the current message; -1 between messages
        self._received = 0  # bytes of the current message
        self._chunks: list[Piece | bytearray] = []
        self._filled: _FilledMessage | None = None  # instead of the chunks

    @property
    def at_message_boundary(self) -> bool:
        """Whether no message is incomplete."""
        return self._missing < 0 and not self._prefix

    def feed(self, piece: Piece) -> None:
        """Reads a piece of data; complete messages go to `messages`.

        Raises RpcError RESOURCE_EXHAUSTED if a message is too large, before any of it is stored.
        """
        position, end = 0, len(piece)
        self.bytes_received += end
        # Nearly always, one piece is one message.
        if end >= PREFIX.size and self.at_message_boundary:
            flag, length = PREFIX.unpack_from(piece)
            if length == end - PREFIX.size:
                check_message_size(length, self._max_size)
                self.messages.append((flag, bytes(piece[PREFIX.size :])))
                return
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
            stop = min(position + self._missing, end)
            if stop > position:
                self._append_chunk(piece[position:stop])
                self._missing -= stop - position
                position = stop
            if not self._missing:
                self._finish_message()

    def _append_chunk(self, part: Piece) -> None:
        self._received += len(part)
        if self._filled is not None:
            self._filled.append(part)
            return
        chunks = self._chunks
        if len(part) >= _MIN_UNJOINED_BYTES or (len(part) == self._missing and not chunks):
            chunks.append(part)
        elif chunks and isinstance(chunks[-1], bytearray):
            chunks[-1] += part
        else:
            chunks.append(bytearray(part))
        size = self._received + self._missing - len(part)
        # A client must send a quarter of what it announces before memory for all is taken.
        if size >= _MIN_FILLED_BYTES and self._received >= size // 4:
            self._start_filling(size)

    def _start_filling(self, size: int) -> None:
        try:
            filled = self._filled = _FilledMessage(size)
        except MemoryError:
            raise RpcError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"The server has no memory for a message of {size} bytes",
            ) from None
        for chunk in self._chunks:
            filled.append(chunk)
        self._chunks = []

    def _finish_message(self) -> None:
        chunks, self._chunks = self._chunks, []
        filled, self._filled = self._filled, None
        message = b"".join(chunks) if filled is None else filled.message
        self.messages.append((self._flag, message))
        self._missing = -1
        self._received = 0


def check_message_size(size: int, max_size: int) -> None:
    """Raises RpcError RESOURCE_EXHAUSTED if a message is too large."""
    if size > max_size:
        raise RpcError(
            StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {max_size})",
        )


async def decompress(message: bytes, encoding: str, max_size: int) -> bytes:
    """Decompresses a message.

    Raises RpcError: INTERNAL if the message is damaged or `encoding` is not known,
    RESOURCE_EXHAUSTED if the result is larger than `max_size` bytes.
    """
    if encoding not in ENCODINGS:
        raise RpcError(
            StatusCode.INTERNAL, "a message is compressed, but grpc-encoding does not say how"
        )
    if len(message) < _MIN_THREAD_BYTES // 16:
        return _decompress(message, encoding, max_size)
    return await asyncio.to_thread(_decompress, message, encoding, max_size)


def _decompress(message: bytes, encoding: str, max_size: int) -> bytes:
    engine = zlib.decompressobj(ENCODINGS[encoding])
    try:
        plain = engine.decompress(message, max_size + 1)
    except zlib.error as error:
        raise RpcError(StatusCode.INTERNAL, f"a message is not {encoding}: {error}") from None
    check_message_size(len(plain), max_size)
    if not engine.eof:
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
