"""The memory of requests that are being received: its budget, and the buffers that join pieces.

Without a limit, a few clients with large requests could make the kernel kill the server.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from host.errors import ErrorCode, HostError
from stub.wire.arena import Block

SMALL_BYTES = 65536
"""A request up to this size may also use an eighth more than the limit.

So large requests do not make the server refuse small ones.
"""

_UNLIMITED = 1 << 62  # bytes

ReserveBlock = Callable[[int], tuple[Block, memoryview] | None]
"""Reserves a block of shared memory; returns it and its bytes to write, None if there is no room.
"""

MIN_PLACED_BYTES = 1 << 16
"""A smaller tensor is not placed, as it may be sent to its model in a message."""


class OutOfReceiveMemory(HostError):
    """There is no memory for a request: RESOURCE_EXHAUSTED in gRPC, status 503 in HTTP."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)


class ReceiveBudget:
    """Counts the bytes of the requests of all connections. Belongs to the event loop.

    Attributes:
        limit: Maximum number of bytes (`--receive-buffer-byte-size`).
        reserved_bytes: The bytes that all requests hold now.
        reserve_block: For large tensors that are received; None without shared memory.
    """

    __slots__ = ("limit", "reserved_bytes", "reserve_block")

    def __init__(self, limit: int = _UNLIMITED, reserve_block: ReserveBlock | None = None) -> None:
        self.limit = limit
        self.reserved_bytes = 0
        self.reserve_block = reserve_block

    def has_room(self, size: int, needed: int) -> bool:
        """Whether a request of `needed` bytes may reserve `size` bytes more."""
        limit = self.limit if needed > SMALL_BYTES else self.limit + self.limit // 8
        return self.total_bytes() + size <= limit

    def reserve(self, size: int) -> None:
        """Counts more bytes; fewer, if `size` is negative."""
        self.reserved_bytes += size

    def total_bytes(self) -> int:
        """The bytes that count against the limit."""
        return self.reserved_bytes


class ReservedBytes:
    """The bytes that one request has reserved. They are released when the object is deleted.

    Attributes:
        size: The number of bytes.
    """

    __slots__ = ("size", "_budget")

    def __init__(self, budget: ReceiveBudget, size: int = 0) -> None:
        """Reserves `size` bytes. Raises OutOfReceiveMemory."""
        self.size = 0
        self._budget = budget
        if size:
            self.add(size)

    def __del__(self) -> None:
        self.release()

    def check_room(self, needed: int) -> None:
        """Raises OutOfReceiveMemory if the request cannot have `needed` bytes in all now."""
        if not self._budget.has_room(needed - self.size, needed):
            raise self._error(needed)

    def add(self, size: int, needed: int = 0) -> None:
        """Reserves more bytes. `needed` is the size of the whole request, if it is known.

        Raises OutOfReceiveMemory.
        """
        needed = max(needed, self.size + size)
        if not self._budget.has_room(size, needed):
            raise self._error(needed)
        self._budget.reserve(size)
        self.size += size

    def subtract(self, size: int) -> None:
        """Releases some of the bytes."""
        self._budget.reserve(-size)
        self.size -= size

    def release(self) -> None:
        """Releases all bytes. A second call does nothing."""
        self.subtract(self.size)

    def _error(self, needed: int) -> OutOfReceiveMemory:
        limit = self._budget.limit
        others = self._budget.total_bytes() - self.size
        advice = "Send less" if needed > limit else "Send it again later"
        return OutOfReceiveMemory(
            f"Not enough memory to receive the request: it needs {needed} bytes, and other requests"
            f" hold {others} of {limit} bytes. {advice}, or raise --receive-buffer-byte-size"
        )


Piece = bytes | memoryview
"""Received data; a view if it is large."""

_MIN_UNJOINED_BYTES = 4096  # bytes; smaller pieces are joined in a buffer
_MIN_FILLED_BYTES = 16 << 20  # bytes; joining a smaller message takes a few milliseconds at most


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_new_view = ctypes.pythonapi.PyMemoryView_FromMemory
_new_view.restype = ctypes.py_object
_new_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)


class MessageFiller(Protocol):
    """Makes a message of its bytes, which are written to their places as they arrive."""

    def writable(self) -> memoryview:
        """Where the next bytes go; not empty before the end of the message."""

    def advance(self, size: int, /) -> None:
        """The first `size` bytes of `writable` have been written."""

    def append(self, part: Piece | bytearray, /) -> None:
        """Copies the next piece."""

    def finish(self) -> bytes:
        """The message, once all bytes have arrived."""


StartFilling = Callable[[int], MessageFiller]
"""Starts to fill a message of the given size in bytes. Raises MemoryError."""


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
        self.memory: memoryview = _new_view(address, size, _WRITABLE)
        self.size = 0

    def writable(self) -> memoryview:
        """Where the next bytes go."""
        return self.memory[self.size :]

    def advance(self, size: int) -> None:
        """The next bytes have been written."""
        self.size += size

    def append(self, part: Piece | bytearray) -> None:
        """Copies the next piece."""
        end = self.size + len(part)
        self.memory[self.size : end] = part
        self.size = end

    def finish(self) -> bytes:
        """The message."""
        return self._message


class Placer(ABC):
    """Fills a message of `size` bytes, whose large tensors go to blocks of shared memory.

    They are not joined to a message and copied out of it again, and are aligned for any library.
    A subclass says in `_begin_part` what follows, by `_keep` and `_place`.
    """

    def __init__(self, size: int, reserve: ReserveBlock) -> None:
        """Raises MemoryError."""
        self._reserve = reserve
        self._left = size  # bytes that have not arrived
        self._rest = FilledMessage(size)  # what is not in blocks
        self._placing = False
        self._view = memoryview(b"")  # what is left to write of the part that arrives now

    @abstractmethod
    def _begin_part(self) -> None:
        """Says what follows."""

    def _keep(self, size: int) -> None:
        """The next `size` bytes are not placed."""
        self._placing = False
        self._view = self._rest.memory[self._rest.size : self._rest.size + size]

    def _place(self, size: int) -> Block | None:
        """The next `size` bytes are placed, unless there is no room; then None."""
        reserved = self._reserve(size)
        if reserved is None:
            self._keep(size)
            return None
        self._placing = True
        block, self._view = reserved
        return block

    def writable(self) -> memoryview:
        """Where the next bytes go."""
        return self._view

    def advance(self, size: int) -> None:
        """The next bytes have been written."""
        self._left -= size
        self._view = self._view[size:]
        if not self._placing:
            self._rest.size += size
        while self._left and not self._view:
            self._begin_part()

    def append(self, part: Piece | bytearray) -> None:
        """Copies the next piece."""
        data = memoryview(part)
        while data:
            view = self._view
            size = min(len(view), len(data))
            view[:size] = data[:size]
            self.advance(size)
            data = data[size:]


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
            self._filled.append(part)
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
            filled.append(chunks.pop())

    @property
    def filled(self) -> MessageFiller | None:
        """What the next bytes may be written to, instead of being appended; then use `advance`."""
        return self._filled

    def advance(self, size: int) -> None:
        """The next bytes have been written to `filled`."""
        self.size += size

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


def _no_memory(size: int) -> OutOfReceiveMemory:
    return OutOfReceiveMemory(f"The server has no memory for a message of {size} bytes")
