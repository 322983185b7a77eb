"""One stream of a connection: what it still has to send, and the room that both ends grant."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import H2ErrorCode
from host.frontends.grpc.h2.limits import ConnectionLimits
from host.frontends.grpc.h2.reader import Piece
from host.frontends.grpc.h2.send_buffer import SendBuffer


class StreamConnection(Protocol):
    """The connection as its streams see it.

    Attributes:
        loop: The event loop of the connection.
        limits: The limits of the connection.
        send_buffer: Sends the frames of all streams.
        streams: The open streams, by id.
    """

    loop: asyncio.AbstractEventLoop
    limits: ConnectionLimits
    send_buffer: SendBuffer
    streams: dict[int, Stream]

    def acknowledge_received_data(self, size: int) -> None:
        """Grants bytes to the client again that were received."""

    def stream_finished(self, stream: Stream) -> None:
        """Called when a stream has sent its end."""

    def reset_stream(self, stream_id: int, code: H2ErrorCode) -> None:
        """Sends RST_STREAM."""

    def on_stream_error(self, stream: int, code: H2ErrorCode) -> None:
        """Called when a request breaks the rules of its stream."""


class Route(Protocol):
    """What a request has been understood as."""

    def open_stream(self, connection: StreamConnection, stream_id: int) -> Stream:
        """Its stream."""


_JOIN_UP_TO = 4096  # bytes; below that, one copy costs less than one more buffer


class Stream(ABC):
    """Base of what a request becomes. The connection calls `on_opened`, `on_data` and `on_aborted`.

    Bytes leave as soon as the windows and the transport have room, and wait here until then.
    """

    __slots__ = (
        "connection",
        "id",
        "send_window",
        "recv_window",
        "remote_ended",
        "closed",
        "unacknowledged_bytes",
        "pending_bytes",
        "_pending",
        "_pending_trailers",
        "on_writable",
        "_window_increment",
    )

    def __init__(self, connection: StreamConnection, stream_id: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.send_window = connection.send_buffer.stream_window
        self.recv_window = connection.limits.stream_window
        self.remote_ended = False
        self.closed = False  # both ends are done with it, or one has given it up
        self.unacknowledged_bytes = 0  # received, but not read by the handler
        self.pending_bytes = 0
        self._pending: deque[Piece] | None = None
        self._pending_trailers: bytes | None = (
            None  # the block that ends the stream after what is pending
        )
        self.on_writable: Callable[[], None] | None = None  # called once, when little enough waits
        self._window_increment = 0  # bytes of the next WINDOW_UPDATE

    @abstractmethod
    def on_opened(self) -> None:
        """The connection knows the stream now."""

    @abstractmethod
    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Bytes of the request; `size` of them, with padding, are to be granted anew."""

    @property
    def incoming_bytes(self) -> int | None:
        """How many bytes there are of what is still to come; None if the client owes nothing."""
        return None

    def on_too_slow(self) -> None:
        """What is still to come takes too long."""
        self.reset(H2ErrorCode.CANCEL)

    @abstractmethod
    def on_aborted(self) -> None:
        """Nobody waits for an answer any more; the stream is closed."""

    def end_unavailable(self, text: str = "") -> None:
        """The connection or the server ends: end with an error, if that is still possible."""
        self.reset(H2ErrorCode.CANCEL)

    def send_headers(self, block: bytes) -> None:
        """The head of the response."""
        send_buffer = self.connection.send_buffer
        send_buffer.data_frames_sent += 1
        send_buffer.write(frames.headers(self.id, block, False, send_buffer.max_frame))

    def send_data(self, prefix: bytes, body: bytes) -> None:
        """Bytes of the response: both after another."""
        send_buffer = self.connection.send_buffer
        size = len(prefix) + len(body)
        if self.closed or not size:
            return
        if self.pending_bytes or size > self.send_window or not send_buffer.has_room(size):
            self._queue_data(prefix, body)
            return
        self.send_window -= size
        send_buffer.window -= size
        send_buffer.data_frames_sent += 1
        head = frames.FRAME_HEADER.pack(size >> 8, size & 255, frames.DATA, 0, self.id)
        if size < _JOIN_UP_TO:
            send_buffer.write(b"%b%b%b" % (head, prefix, body))
        else:
            send_buffer.write(head + prefix)
            send_buffer.write(body)

    def send_trailers(self, block: bytes) -> None:
        """Trailers, which end the response."""
        if self.closed:
            return
        if self.pending_bytes:
            self._pending_trailers = block
            return
        send_buffer = self.connection.send_buffer
        send_buffer.data_frames_sent += 1
        send_buffer.write(frames.headers(self.id, block, True, send_buffer.max_frame))
        self.connection.stream_finished(self)

    def send_response(self, head: bytes, prefix: bytes, body: bytes, tail: bytes) -> None:
        """A whole response: `send_headers`, `send_data` and `send_trailers` at the price of one."""
        send_buffer = self.connection.send_buffer
        size = len(prefix) + len(body)
        if (
            size > _JOIN_UP_TO
            or size > self.send_window
            or size > send_buffer.window
            or send_buffer.writing_paused
            or send_buffer.waiting_streams
            or self.closed
        ):
            self.send_headers(head)
            self.send_data(prefix, body)
            self.send_trailers(tail)
            return
        send_buffer.window -= size
        send_buffer.data_frames_sent += 1
        pack, number = frames.FRAME_HEADER.pack, self.id
        send_buffer.write(
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
        self.connection.stream_finished(self)

    def reset(self, code: H2ErrorCode) -> None:
        """Give the stream up, with all that waits."""
        self.connection.reset_stream(self.id, code)

    def send_pending(self, max_bytes: int) -> bool:
        """Send of what waits what there is room for, `max_bytes` bytes; whether anything left."""
        send_buffer, pending = self.connection.send_buffer, self._pending
        left = max_bytes
        while pending and left > 0:
            size = min(
                self.pending_bytes,
                left,
                self.send_window,
                send_buffer.window,
                send_buffer.max_frame,
            )
            if size <= 0:
                break
            send_buffer.data_frames_sent += 1
            send_buffer.write(frames.frame_header(size, frames.DATA, 0, self.id))
            self._write_pending(size)
            self.send_window -= size
            send_buffer.window -= size
            self.pending_bytes -= size
            left -= size
        if (
            self.on_writable is not None
            and self.pending_bytes <= self.connection.limits.max_send_queue
        ):
            self.connection.loop.call_soon(self.on_writable)  # for it may send more
            self.on_writable = None
        if self._pending_trailers is not None and not self.pending_bytes:
            self.send_trailers(self._pending_trailers)
        return left < max_bytes

    def acknowledge_received_data(self, size: int) -> None:
        """Grant so many received bytes anew, to the connection and to this stream."""
        self.connection.acknowledge_received_data(size)
        if self.remote_ended or self.closed:
            return
        self._window_increment += size
        if self._window_increment >= self.connection.limits.stream_window // 2:
            self.recv_window += self._window_increment
            self.connection.send_buffer.data_frames_sent += 1
            self.connection.send_buffer.write(frames.window_update(self.id, self._window_increment))
            self._window_increment = 0

    def mark_closed(self) -> None:
        """Forget what waits; for the connection."""
        self.closed = True
        self._pending, self._pending_trailers, self.pending_bytes = None, None, 0
        self.on_writable = None
        if self.unacknowledged_bytes:
            self.connection.acknowledge_received_data(self.unacknowledged_bytes)
            self.unacknowledged_bytes = 0

    def _queue_data(self, prefix: bytes, body: bytes) -> None:
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
            self.connection.send_buffer.add_waiting_stream(self)

    def _write_pending(self, size: int) -> None:
        pending, write = self._pending, self.connection.send_buffer.write
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
