"""Messages of gRPC inside of a stream's bytes: where each ends, and their compression."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import deque

from host.frontends.grpc.h2.reader import Piece
from host.frontends.grpc.h2.status import Code, RpcFault

PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""

ENCODINGS = {"gzip": 31, "deflate": zlib.MAX_WBITS}
"""What messages may be compressed with, and what zlib calls it."""

_SMALL = 4096  # bytes; pieces below that are collected in one buffer
_LONG = 1 << 18  # bytes whose compression would stop the event loop for milliseconds


class MessageReader:
    """Puts messages together from the pieces in which a stream brings them."""

    __slots__ = ("ready", "taken", "_most", "_head", "_flag", "_left", "_chunks")

    def __init__(self, most: int) -> None:
        self.ready: deque[tuple[int, bytes]] = deque()  # (compressed, message)
        self.taken = 0  # bytes so far
        self._most = most
        self._head = b""  # of a message, until it is complete
        self._flag = 0
        self._left = -1  # bytes of the current message that are missing; -1 between messages
        self._chunks: list[Piece | bytearray] = []

    @property
    def between(self) -> bool:
        """Whether no message has come only in part."""
        return self._left < 0 and not self._head

    def feed(self, piece: Piece) -> None:
        """Take more bytes. Raises RpcFault RESOURCE_EXHAUSTED for a message that is too large,
        before any of it is kept."""
        position, end = 0, len(piece)
        self.taken += end
        if end >= PREFIX.size and self.between:  # nearly always: one message comes in one piece
            flag, length = PREFIX.unpack_from(piece)
            if length == end - PREFIX.size:
                check_size(length, self._most)
                self.ready.append((flag, bytes(piece[PREFIX.size :])))
                return
        while position < end or self._left == 0:
            if self._left < 0:
                missing = PREFIX.size - len(self._head)
                head = self._head + bytes(piece[position : position + missing])
                position += missing
                if len(head) < PREFIX.size:
                    self._head = head
                    return
                self._head = b""
                self._flag, self._left = PREFIX.unpack(head)
                check_size(self._left, self._most)
            stop = min(position + self._left, end)
            if stop > position:
                self._keep(piece[position:stop])
                self._left -= stop - position
                position = stop
            if not self._left:
                self._complete()

    def _keep(self, part: Piece) -> None:
        chunks = self._chunks
        if len(part) >= _SMALL or (len(part) == self._left and not chunks):
            chunks.append(part)
        elif chunks and isinstance(chunks[-1], bytearray):
            chunks[-1] += part
        else:
            chunks.append(bytearray(part))

    def _complete(self) -> None:
        chunks, self._chunks = self._chunks, []
        self.ready.append((self._flag, b"".join(chunks)))
        self._left = -1


def check_size(size: int, most: int) -> None:
    """Raise RpcFault RESOURCE_EXHAUSTED if a message is too large."""
    if size > most:
        raise RpcFault(
            Code.RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {most})"
        )


async def decompress(message: bytes, encoding: str, most: int) -> bytes:
    """The message itself. Raises RpcFault: INTERNAL if it cannot be, RESOURCE_EXHAUSTED if it
    becomes larger than `most` bytes."""
    if encoding not in ENCODINGS:
        raise RpcFault(Code.INTERNAL, "a message is compressed, but grpc-encoding does not say how")
    if len(message) < _LONG // 16:
        return _decompress(message, encoding, most)
    return await asyncio.to_thread(_decompress, message, encoding, most)


def _decompress(message: bytes, encoding: str, most: int) -> bytes:
    engine = zlib.decompressobj(ENCODINGS[encoding])
    try:
        plain = engine.decompress(message, most + 1)
    except zlib.error as error:
        raise RpcFault(Code.INTERNAL, f"a message is not {encoding}: {error}") from None
    check_size(len(plain), most)
    if not engine.eof:
        raise RpcFault(Code.INTERNAL, f"a message is not {encoding}: its end is missing")
    return plain


async def compress(message: bytes, encoding: str) -> tuple[bytes, bytes]:
    """Prefix and body; the body is the message itself where compression gains nothing."""
    if len(message) < _LONG:
        body = _compress(message, encoding)
    else:
        body = await asyncio.to_thread(_compress, message, encoding)
    if len(body) < len(message):
        return PREFIX.pack(1, len(body)), body
    return PREFIX.pack(0, len(message)), message


def _compress(message: bytes, encoding: str) -> bytes:
    engine = zlib.compressobj(wbits=ENCODINGS[encoding])
    return engine.compress(message) + engine.flush()
