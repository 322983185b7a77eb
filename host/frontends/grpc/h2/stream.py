"""One stream of a connection: what it still has to send, and the room that both ends grant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import ErrorCode
from host.frontends.grpc.h2.reader import Piece

if TYPE_CHECKING:
    from host.frontends.grpc.h2.connection import Connection


class Route(Protocol):
    """What a request has been understood as."""

    def open(self, connection: Connection, stream_id: int) -> Stream:
        """Its stream."""


_JOIN_UP_TO = 4096  # bytes; below that, one copy costs less than one more buffer


class Stream(ABC):
    """Base of what a request becomes. The connection calls `begin`, `received` and `aborted`.

    Bytes leave as soon as the windows and the transport have room, and wait here until then.
    """

    __slots__ = (
        "connection",
        "id",
        "send_window",
        "recv_window",
        "remote_ended",
        "closed",
        "held",
        "pending_bytes",
        "_pending",
        "_tail",
        "on_room",
        "_uncredited",
    )

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.send_window = connection.out.stream_window
        self.recv_window = connection.limits.stream_window
        self.remote_ended = False
        self.closed = False  # both ends are done with it, or one has given it up
        self.held = 0  # received bytes that are not to be granted anew yet
        self.pending_bytes = 0
        self._pending: deque[Piece] | None = None
        self._tail: bytes | None = None  # the block that ends the stream after what is pending
        self.on_room: Callable[[], None] | None = None  # called once, when little enough waits
        self._uncredited = 0

    @abstractmethod
    def begin(self) -> None:
        """The connection knows the stream now."""

    @abstractmethod
    def received(self, piece: Piece, size: int, end: bool) -> None:
        """Bytes of the request; `size` of them, with padding, are to be granted anew."""

    @property
    def arriving(self) -> int | None:
        """How many bytes there are of what is still to come; None if the client owes nothing."""
        return None

    def too_slow(self) -> None:
        """What is still to come takes too long."""
        self.reset(ErrorCode.CANCEL)

    @abstractmethod
    def aborted(self) -> None:
        """Nobody waits for an answer any more; the stream is closed."""

    def unavailable(self, text: str = "") -> None:
        """The connection or the server ends: end with an error, if that is still possible."""
        self.reset(ErrorCode.CANCEL)

    def send_headers(self, block: bytes) -> None:
        """The head of the response."""
        out = self.connection.out
        out.sent_data += 1
        out.write(frames.headers(self.id, block, False, out.max_frame))

    def send(self, prefix: bytes, body: bytes) -> None:
        """Bytes of the response: both after another."""
        out = self.connection.out
        size = len(prefix) + len(body)
        if self.closed or not size:
            return
        if self.pending_bytes or size > self.send_window or not out.fits(size):
            self._queue(prefix, body)
            return
        self.send_window -= size
        out.window -= size
        out.sent_data += 1
        head = frames.HEAD.pack(size >> 8, size & 255, frames.DATA, 0, self.id)
        if size < _JOIN_UP_TO:
            out.write(b"%b%b%b" % (head, prefix, body))
        else:
            out.write(head + prefix)
            out.write(body)

    def finish(self, block: bytes) -> None:
        """Trailers, which end the response."""
        if self.closed:
            return
        if self.pending_bytes:
            self._tail = block
            return
        out = self.connection.out
        out.sent_data += 1
        out.write(frames.headers(self.id, block, True, out.max_frame))
        self.connection.finished(self)

    def respond(self, head: bytes, prefix: bytes, body: bytes, tail: bytes) -> None:
        """A whole response: `send_headers`, `send` and `finish` at the price of one."""
        out = self.connection.out
        size = len(prefix) + len(body)
        if (
            size > _JOIN_UP_TO
            or size > self.send_window
            or size > out.window
            or out.paused
            or out.waiting
            or self.closed
        ):
            self.send_headers(head)
            self.send(prefix, body)
            self.finish(tail)
            return
        out.window -= size
        out.sent_data += 1
        pack, number = frames.HEAD.pack, self.id
        out.write(
            b"".join(
                (
                    pack(0, len(head), frames.HEADERS, frames.END_HEADERS, number),
                    head,
                    pack(size >> 8, size & 255, frames.DATA, 0, number),
                    prefix,
                    body,
                    pack(0, len(tail), frames.HEADERS, 5, number),  # END_HEADERS | END_STREAM
                    tail,
                )
            )
        )
        self.connection.finished(self)

    def reset(self, code: ErrorCode) -> None:
        """Give the stream up, with all that waits."""
        self.connection.reset(self.id, code)

    def advance(self, most: int) -> bool:
        """Send of what waits what there is room for, `most` bytes; whether anything left."""
        out, pending = self.connection.out, self._pending
        left = most
        while pending and left > 0:
            size = min(
                self.pending_bytes,
                left,
                self.send_window,
                out.window,
                out.max_frame,
            )
            if size <= 0:
                break
            out.sent_data += 1
            out.write(frames.head(size, frames.DATA, 0, self.id))
            self._take(size)
            self.send_window -= size
            out.window -= size
            self.pending_bytes -= size
            left -= size
        if self.on_room is not None and self.pending_bytes <= self.connection.limits.send_queue:
            self.connection.loop.call_soon(self.on_room)  # for it may send more
            self.on_room = None
        if self._tail is not None and not self.pending_bytes:
            self.finish(self._tail)
        return left < most

    def credit(self, size: int) -> None:
        """Grant so many received bytes anew, to the connection and to this stream."""
        self.connection.credit(size)
        if self.remote_ended or self.closed:
            return
        self._uncredited += size
        if self._uncredited >= self.connection.limits.stream_window // 2:
            self.recv_window += self._uncredited
            self.connection.out.sent_data += 1
            self.connection.out.write(frames.window_update(self.id, self._uncredited))
            self._uncredited = 0

    def close(self) -> None:
        """Forget what waits; for the connection."""
        self.closed = True
        self._pending, self._tail, self.pending_bytes = None, None, 0
        self.on_room = None
        if self.held:
            held, self.held = self.held, 0
            self.connection.credit(held)

    def _queue(self, prefix: bytes, body: bytes) -> None:
        if self._pending is None:
            self._pending = deque()
        size = len(prefix) + len(body)
        if size < _JOIN_UP_TO:
            self._pending.append(prefix + body)
        else:
            self._pending.append(prefix)
            self._pending.append(memoryview(body))
        first = not self.pending_bytes
        self.pending_bytes += size
        if first and self.send_window > 0:
            self.connection.out.wait(self)

    def _take(self, size: int) -> None:
        pending, write = self._pending, self.connection.out.write
        assert pending is not None
        while size:
            piece = pending[0]
            if len(piece) <= size:
                write(pending.popleft())
                size -= len(piece)
            else:
                write(piece[:size])
                pending[0] = memoryview(piece)[size:]
                size = 0
