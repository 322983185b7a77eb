"""The send buffer of an HTTP/2 connection: collects frames and shares the window fairly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import ConnectionLimits, H2ConnectionError, H2ErrorCode, Setting
from host.frontends.receive_memory import Piece
from host.frontends.sockets import SocketWriter

_QUANTUM = 65536  # bytes that a waiting stream sends before the next stream has its turn
_MAX_JOINED_MEAN = 2048  # bytes; buffers of a smaller mean size are joined


class SendingStream(Protocol):
    """A stream as the send buffer sees it.

    Attributes:
        send_window: Bytes that the client has granted to the stream.
        pending_bytes: Bytes that the stream could not send yet.
    """

    send_window: int

    pending_bytes: int

    def send_pending(self, max_bytes: int) -> bool:
        """Sends at most `max_bytes` of the pending bytes; returns whether any were sent."""


class SendBuffer:
    """Collects frames, and writes them to the transport together.

    Frames that are written while the buffer is corked, or before a `flush_soon` is due, are sent in
    one piece. While the transport has enough to send (`writing_paused`), data stays pending in the
    streams.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.window = frames.DEFAULT_WINDOW  # bytes that the client accepts on the connection
        self.stream_window = frames.DEFAULT_WINDOW  # bytes that it accepts on each new stream
        self.max_frame = frames.DEFAULT_MAX_FRAME
        self.max_header_list_size = 0  # bytes that the client accepts; 0 for no limit
        self.writing_paused = False
        self.data_frames_sent = 0  # frames of HEADERS, DATA and WINDOW_UPDATE
        # Streams with pending data and a send window, in the order of their turns.
        self.waiting_streams: dict[SendingStream, None] = {}
        self.corked = False
        self.buffered_bytes = 0
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._write_small: Callable[[Piece], None]
        self._loop = asyncio.get_running_loop()
        self._buffers: list[Piece] = []
        self._flush_due = False
        self._unsent_control = 0

    def attach_transport(self, transport: asyncio.Transport) -> None:
        """Sets the transport to write to."""
        transport.set_write_buffer_limits(self._limits.write_buffer)
        self._transport = transport
        self._write_small = SocketWriter(transport).write

    def flush_and_close(self) -> None:
        """Writes all frames, and drops any later ones."""
        self.corked = False
        self.flush()
        self._transport = None
        self.waiting_streams.clear()

    def write(self, data: Piece) -> None:
        """Adds bytes of a frame; the next flush sends them."""
        self._buffers.append(data)
        self.buffered_bytes += len(data)

    def send_small(self, data: bytes, soon: bool) -> None:
        """Adds a few frames and flushes; `soon`: at the end of this iteration of the loop."""
        if soon or self.corked or self._buffers:
            self._buffers.append(data)
            self.buffered_bytes += len(data)
            if not soon:
                self.flush()
            elif not self._flush_due or self.buffered_bytes >= _QUANTUM:
                self.flush_soon()
        elif self._transport is not None:
            self._write_small(data)

    def write_control_frame(self, frame: bytes) -> None:
        """Adds the answer to a control frame.

        Raises H2ConnectionError if a client that reads no answers causes too many of them.
        """
        self.write(frame)
        if self.writing_paused:
            self._unsent_control += len(frame)
            if self._unsent_control > self._limits.max_unsent_control:
                raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")

    def flush(self) -> None:
        """Writes all frames to the transport, unless the buffer is corked."""
        if self.corked:
            return
        buffers, size = self._buffers, self.buffered_bytes
        if not buffers:
            return
        self._buffers, self.buffered_bytes = [], 0
        if self._transport is None:
            return
        if size < len(buffers) * _MAX_JOINED_MEAN:
            self._write_small(buffers[0] if len(buffers) == 1 else b"".join(buffers))
        elif len(buffers) == 1:
            self._transport.write(buffers[0])
        else:
            self._transport.writelines(buffers)

    def _flush_large(self) -> None:
        """Writes all frames, so that the transport can pause writing."""
        corked, self.corked = self.corked, False
        self.flush()
        self.corked = corked

    def flush_soon(self) -> None:
        """Flushes at the end of this iteration of the event loop, together with later frames.

        Large amounts are written at once, even if corked, so that the transport can pause writing.
        """
        if self.buffered_bytes >= _QUANTUM:
            self._flush_large()
        elif not self._flush_due and not self.corked:
            self._flush_due = True
            self._loop.call_soon(self._flush_now)

    def resume_writing(self) -> None:
        """Sends pending data, as the transport has room again."""
        self.writing_paused = False
        self._unsent_control = 0
        self.send_waiting()
        self.flush()

    def has_room(self, size: int) -> bool:
        """Whether the connection can send a DATA frame of `size` bytes now."""
        return size <= self.window and size <= self.max_frame and not self.writing_paused

    def add_waiting_stream(self, stream: SendingStream) -> None:
        """Adds a stream with pending data and a send window."""
        self.waiting_streams[stream] = None
        self.send_waiting()

    def increase_window(self, increment: int) -> None:
        """Increases the connection's window. Raises H2ConnectionError if it exceeds 2^31-1."""
        self.window += increment
        if self.window > frames.MAX_WINDOW:
            raise H2ConnectionError(H2ErrorCode.FLOW_CONTROL_ERROR, "the window grew too large")
        if self.waiting_streams:
            self.send_waiting()

    def apply_settings(
        self, settings: Iterable[tuple[int, int]], streams: Iterable[SendingStream]
    ) -> None:
        """Applies the client's settings. Raises H2ConnectionError if a value is invalid.

        Only the last window of a frame is applied, as each one changes all streams.
        """
        window = self.stream_window
        for number, value in settings:
            if number == Setting.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise H2ConnectionError(
                        H2ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}"
                    )
                window = value
            elif number == Setting.MAX_FRAME_SIZE:
                if not frames.DEFAULT_MAX_FRAME <= value <= frames.LARGEST_MAX_FRAME:
                    raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
                self.max_frame = value
            elif number == Setting.MAX_HEADER_LIST_SIZE:
                self.max_header_list_size = value
            elif number == Setting.ENABLE_PUSH and value > 1:
                raise H2ConnectionError(H2ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
        if window != self.stream_window:
            self._set_initial_window(window, streams)

    def _set_initial_window(self, window: int, streams: Iterable[SendingStream]) -> None:
        """Changes the window of all streams. Raises H2ConnectionError if one exceeds 2^31-1."""
        more, self.stream_window = window - self.stream_window, window
        for stream in streams:
            self.increase_stream_window(stream, more)
            if stream.send_window > frames.MAX_WINDOW:
                raise H2ConnectionError(H2ErrorCode.FLOW_CONTROL_ERROR, "a window grew too large")

    def increase_stream_window(self, stream: SendingStream, increment: int) -> None:
        """Changes the send window of a stream; the caller calls `send_waiting` afterwards."""
        stream.send_window += increment
        if stream.send_window <= 0:
            self.waiting_streams.pop(stream, None)
        elif stream.pending_bytes:
            self.waiting_streams[stream] = None

    def send_waiting(self) -> None:
        """Sends pending data, a part of each waiting stream in turn."""
        waiting = self.waiting_streams
        while waiting and self.window > 0 and not self.writing_paused:
            stream = next(iter(waiting))
            del waiting[stream]
            stream.send_pending(_QUANTUM)
            if stream.pending_bytes and stream.send_window > 0:
                waiting[stream] = None  # behind the others
            if self.buffered_bytes >= _QUANTUM:
                self._flush_large()

    def _flush_now(self) -> None:
        self._flush_due = False
        self.flush()
