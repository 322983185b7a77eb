"""A stream of an HTTP/2 connection: its flow-control windows and its pending data.

The words are those of docs/explanation/flow-control.md.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import ConnectionLimits, H2ErrorCode
from host.frontends.grpc.h2.grpc_messages import ReceivedMessage
from host.frontends.grpc.h2.send_buffer import SendBuffer
from host.frontends.receive_memory import Piece, ReceiveBudget


class StreamConnection(Protocol):
    """The connection as its streams see it.

    Attributes:
        loop: The event loop of the connection.
        limits: The limits of the connection.
        receive_budget: Limits the memory of incoming messages.
        send_buffer: Sends the frames of all streams.
        streams: The open streams, by id.
        unacknowledged_bytes: Received bytes that the next WINDOW_UPDATE acknowledges. It is sent at
            the end of an input, or by `acknowledge_received_data`, if there are enough.
        deadlines_due: When the connection looks at the deadlines of all streams next.
    """

    loop: asyncio.AbstractEventLoop
    limits: ConnectionLimits
    receive_budget: ReceiveBudget
    send_buffer: SendBuffer
    streams: dict[int, Stream]
    unacknowledged_bytes: int
    deadlines_due: float

    def acknowledge_received_data(self, size: int) -> None:
        """Acknowledges received bytes, so that the client may send as many again."""

    def watch_deadlines(self, due: float, seconds: float) -> None:
        """Looks at the deadlines of all streams in `seconds` seconds, when one is due."""

    def stop_request(self, stream: Stream) -> None:
        """Tells a client that still sends its request to stop, as the response is sent."""

    def remove_stream(self, stream: Stream) -> None:
        """Removes a stream that is complete, or reset."""

    def reset_stream(self, stream_id: int, code: H2ErrorCode) -> None:
        """Sends RST_STREAM."""

    def on_stream_error(self, stream: int, code: H2ErrorCode) -> None:
        """Resets a stream because the client has broken a rule."""


class Route(msgspec.Struct):
    """How a kind of request is handled.

    `stream`: makes the stream that handles the request. `acts_at_once`: whether its `on_opened`
    does anything.
    """

    stream: Callable[[StreamConnection, int], Stream]
    acts_at_once: bool


JOIN_UP_TO = 4096
"""Bytes; copying less than this is cheaper than one more buffer."""

NO_DEADLINE = math.inf


class Stream(ABC):
    """Base class of the streams. The connection calls `on_opened`, `on_data` and `on_aborted`.

    A stream sends data as soon as the windows and the transport have room. Until then the data is
    pending.

    Attributes:
        deadline: When `on_deadline` is called if the stream is open, by the clock of the loop.
        takes_message: Whether `on_message` may be called instead of `on_data`.
        at_message_boundary: Whether `on_messages` may be called instead of `on_data`.
    """

    deadline = NO_DEADLINE
    takes_message = False
    at_message_boundary = False

    unacknowledged_bytes = 0  # received, but not read by the handler
    _pending_trailers: bytes | None = None  # sent after the pending data
    on_writable: Callable[[], None] | None = None
    """Called once, when the pending data is within `max_send_queue`."""
    _window_increment = 0  # bytes of the next WINDOW_UPDATE

    def __init__(
        self,
        rpc: Any,
        content_length: int | None,
        connection: StreamConnection,
        stream_id: int,
    ) -> None:
        """`rpc`: the parsed header of the request; None if it is refused."""
        # Python reads these faster than attributes of the class.
        self.rpc = rpc
        self.remote_ended = False
        self.closed = False  # complete in both directions, or reset
        self.remaining_length = content_length  # None if the request has none
        self.pending_bytes = 0
        self._pending: deque[Piece] | None = None
        self.connection = connection
        self.id = stream_id
        self.send_window = connection.send_buffer.stream_window
        self.recv_window = connection.limits.stream_window

    @abstractmethod
    def on_opened(self) -> None:
        """Called when the stream is open."""

    @abstractmethod
    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Called with data of the request.

        `size` is the number of bytes to acknowledge; it includes padding. `end` means that the
        client sends no more.
        """

    @property
    def incoming_bytes(self) -> int | None:
        """Bytes received of an incomplete message; None if the server waits for none."""
        return None

    @property
    def unread_bytes(self) -> int:
        """Bytes of a complete response that the client must read in time; 0 if it need not."""
        return 0

    def on_message(self, message: bytes) -> None:
        """Called with the only message, not compressed, of a request that is complete."""
        raise NotImplementedError

    def on_messages(self, messages: Sequence[ReceivedMessage], size: int) -> None:
        """Called with whole messages of a request that goes on."""
        raise NotImplementedError

    def on_deadline(self) -> None:
        """Called when the deadline has passed."""
        self.reset(H2ErrorCode.CANCEL)

    def on_too_slow(self) -> None:
        """Called when the rest of an incomplete message arrives too slowly."""
        self.reset(H2ErrorCode.CANCEL)

    @abstractmethod
    def on_aborted(self) -> None:
        """Called after the stream was closed without a response, to cancel its work."""

    def end_unavailable(self, text: str = "") -> None:
        """Ends the stream with an error, if possible, because the connection ends."""
        self.reset(H2ErrorCode.CANCEL)

    def send_headers(self, block: bytes) -> None:
        """Sends the headers of the response."""
        send_buffer = self.connection.send_buffer
        send_buffer.data_frames_sent += 1
        send_buffer.write(frames.headers(self.id, block, False, send_buffer.max_frame))

    def send_data(self, prefix: bytes, body: bytes) -> None:
        """Sends `prefix` and then `body`, or adds them to the pending data."""
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
        if size < JOIN_UP_TO:
            send_buffer.write(b"%b%b%b" % (head, prefix, body))
        else:
            send_buffer.write(head + prefix)
            send_buffer.write(body)

    def send_trailers(self, block: bytes) -> None:
        """Sends the trailers, which end the response, after the pending data."""
        if self.closed:
            return
        if self.pending_bytes:
            self._pending_trailers = block
            return
        send_buffer = self.connection.send_buffer
        send_buffer.data_frames_sent += 1
        send_buffer.write(frames.headers(self.id, block, True, send_buffer.max_frame))
        connection = self.connection
        if not self.remote_ended:
            connection.stop_request(self)
        connection.remove_stream(self)

    def reset(self, code: H2ErrorCode) -> None:
        """Resets the stream and drops its pending data."""
        self.connection.reset_stream(self.id, code)

    def send_pending(self, max_bytes: int) -> bool:
        """Sends at most `max_bytes` of the pending data; returns whether any data was sent."""
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
            self.connection.loop.call_soon(self.on_writable)  # not now, as it may send more
            self.on_writable = None
        if self._pending_trailers is not None and not self.pending_bytes:
            self.send_trailers(self._pending_trailers)
        return left < max_bytes

    def acknowledge_received_data(self, size: int) -> None:
        """Acknowledges received bytes to the windows of the connection and of this stream.

        The client gets a WINDOW_UPDATE when half of the window is acknowledged.
        """
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
        """Drops the pending data and acknowledges received data; called by the connection."""
        self.closed = True
        self.drop_pending()
        self.on_writable = None
        if self.unacknowledged_bytes:
            self.connection.acknowledge_received_data(self.unacknowledged_bytes)
            self.unacknowledged_bytes = 0

    def drop_pending(self) -> None:
        """Drops the data that was not sent yet."""
        self._pending, self._pending_trailers, self.pending_bytes = None, None, 0

    def _queue_data(self, prefix: bytes, body: bytes) -> None:
        if self._pending is None:
            self._pending = deque()
        size = len(prefix) + len(body)
        if size < JOIN_UP_TO:
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
