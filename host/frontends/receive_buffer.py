"""Joins the received pieces of a message or body, and reserves their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

from host.frontends.receive_budget import OutOfReceiveMemory, ReceiveBudget, ReservedBytes

Piece = bytes | memoryview
"""Received data; a view if it is large."""

_MIN_UNJOINED_BYTES = 4096  # bytes; smaller pieces are joined in a buffer
_MIN_FILLED_BYTES = 16 << 20  # bytes; joining a smaller message takes a few milliseconds at most


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)


class MessageFiller(Protocol):
    """Makes a message of its pieces, each of which is copied when it arrives."""

    def append(self, part: Piece | bytearray, /) -> None:
        """Copies the next piece. Raises MemoryError."""

    def finish(self) -> bytes:
        """The message, once all pieces have arrived."""


StartFilling = Callable[[int], MessageFiller]
"""Starts to fill a message of the given size in bytes."""


class FilledMessage:
    """A new bytes object that is filled piece by piece before it is used.

    Joining the pieces of a large message would hold up the event loop: for 64 MiB, 30 ms. Python's
    C API allows filling an object that PyBytes_FromStringAndSize(NULL, size) has returned. The
    system gives a large one its memory as it is filled.

    Attributes:
        size: The number of bytes filled so far.
        memory: All bytes, to be written while this object lives.
    """

    __slots__ = ("size", "memory", "_message")

    def __init__(self, size: int) -> None:
        """Raises MemoryError."""
        self._message: bytes = _new_bytes(None, size)
        address = _address(self._message)
        self.memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        self.size = 0

    def append(self, part: Piece | bytearray) -> None:
        """Copies the next piece."""
        end = self.size + len(part)
        self.memory[self.size : end] = part
        self.size = end

    def finish(self) -> bytes:
        """The message."""
        return self._message


class ReceiveBuffer:
    """Collects the pieces of one message or body.

    Memory is reserved as the pieces arrive, not for what a client announces: a client must send a
    quarter of that before memory for all is taken.

    Attributes:
        size: The number of bytes received so far.
        reserved: The memory of the pieces, and then of the message.
    """

    __slots__ = ("size", "reserved", "_announced", "_chunks", "_filled", "_start", "_min_filled")

    def __init__(
        self,
        budget: ReceiveBudget,
        announced: int | None,
        start: StartFilling | None = None,
        min_filled: int = 0,
    ) -> None:
        """`announced`: bytes of the whole message, None if it is not known.

        A message of `min_filled` bytes or more is filled by what `start` returns. Raises
        OutOfReceiveMemory if the budget has no room for the announced bytes now.
        """
        self.size = 0
        self.reserved = ReservedBytes(budget)
        self._announced = announced
        self._chunks: list[Piece | bytearray] = []
        self._filled: MessageFiller | None = None  # instead of the chunks
        self._start: StartFilling = start or FilledMessage
        self._min_filled = min_filled if start else _MIN_FILLED_BYTES
        if announced is not None:
            self.reserved.check_room(announced)

    def append(self, part: Piece) -> None:
        """Adds a piece. Raises OutOfReceiveMemory."""
        self.size += len(part)
        if self._filled is not None:
            self._fill(self._filled, part)
            return
        announced, chunks = self._announced or 0, self._chunks
        self.reserved.add(len(part), announced)
        if len(part) >= _MIN_UNJOINED_BYTES or (self.size == announced and not chunks):
            chunks.append(part)
        elif chunks and isinstance(chunks[-1], bytearray):
            chunks[-1] += part
        else:
            chunks.append(bytearray(part))
        if announced >= self._min_filled and self.size >= announced // 4:
            self._start_filling(announced)

    def _start_filling(self, size: int) -> None:
        self.reserved.add(size - self.size, size)
        try:
            filled = self._filled = self._start(size)
        except MemoryError:
            raise _no_memory(size) from None
        chunks = self._chunks
        chunks.reverse()
        while chunks:  # each one is freed when it is copied
            self._fill(filled, chunks.pop())

    def _fill(self, filled: MessageFiller, part: Piece | bytearray) -> None:
        try:
            filled.append(part)
        except MemoryError:
            raise _no_memory(self._announced) from None

    def finish(self) -> bytes:
        """Returns the message. Raises OutOfReceiveMemory."""
        filled, self._filled = self._filled, None
        if filled is not None:
            return filled.finish()
        chunks, self._chunks = self._chunks, []
        if len(chunks) == 1 and isinstance(chunks[0], bytes):
            return chunks[0]
        if self.size >= _MIN_FILLED_BYTES:
            self.reserved.check_room(2 * self.size)  # the pieces and the message, for a moment
        return b"".join(chunks)

    def discard(self) -> None:
        """Drops the pieces and releases their memory."""
        self._chunks, self._filled = [], None
        self.reserved.release()


def _no_memory(size: int | None) -> OutOfReceiveMemory:
    return OutOfReceiveMemory(f"The server has no memory for a message of {size} bytes")
