"""What a connection sends: buffers on their way to the transport, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import ConnectionFault, ErrorCode, Setting
from host.frontends.grpc.h2.limits import Limits
from host.frontends.grpc.h2.reader import Piece
from host.frontends.socket_writer import SocketWriter

if TYPE_CHECKING:
    from host.frontends.grpc.h2.stream import Stream

_QUANTUM = 65536  # bytes of a stream before it is another one's turn
_SMALL = 2048  # bytes; buffers of this mean size are joined before they are written


class Outbox:
    """Collects frames and writes them together; streams without room wait in it.

    What is written while it is corked, or before a `flush_soon` is due, leaves in one piece. While
    the transport has enough to send (`paused`), streams keep their data.
    """

    def __init__(self, limits: Limits) -> None:
        self.window = frames.DEFAULT_WINDOW  # what the client has granted to the connection
        self.stream_window = frames.DEFAULT_WINDOW  # what it grants to each new stream
        self.max_frame = frames.DEFAULT_MAX_FRAME
        self.header_list = 0  # bytes that it takes; 0 for no limit
        self.paused = False
        self.sent_data = 0  # frames of HEADERS, DATA and WINDOW_UPDATE
        self.waiting: dict[Stream, None] = {}  # with bytes to send, and room in their own window
        self.corked = False
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._write_small: Callable[[Piece], None]
        self._loop = asyncio.get_running_loop()
        self._buffers: list[Piece] = []
        self._bytes = 0
        self._flush_due = False
        self._unsent_control = 0

    def open(self, transport: asyncio.Transport) -> None:
        """Where everything goes."""
        transport.set_write_buffer_limits(self._limits.write_buffer)
        self._transport = transport
        self._write_small = SocketWriter(transport).write

    def close(self) -> None:
        """Write what is there, and nothing after that."""
        self.corked = False
        self.flush()
        self._transport = None
        self.waiting.clear()

    def write(self, data: Piece) -> None:
        """Bytes of a frame; they leave with the next flush."""
        self._buffers.append(data)
        self._bytes += len(data)

    def control(self, frame: bytes) -> None:
        """Write an answer that costs the client nothing to cause.

        Raises ConnectionFault if it causes many and reads none.
        """
        self.write(frame)
        if self.paused:
            self._unsent_control += len(frame)
            if self._unsent_control > self._limits.unsent_control:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")

    def flush(self) -> None:
        """Give the transport what was written, unless whoever corked it will do that."""
        if not self.corked:
            self._hand_over()

    def _hand_over(self) -> None:
        buffers = self._buffers
        if not buffers:
            return
        size, self._buffers, self._bytes = self._bytes, [], 0
        if self._transport is None:
            return
        if size < len(buffers) * _SMALL:
            self._write_small(buffers[0] if len(buffers) == 1 else b"".join(buffers))
        elif len(buffers) == 1:
            self._transport.write(buffers[0])
        else:
            self._transport.writelines(buffers)

    def flush_soon(self) -> None:
        """Flush when this turn of the loop is over, together with what others write in it.

        Whoever writes much in one turn, corked or not, has to learn when the transport has enough.
        """
        if self._bytes >= _QUANTUM:
            self._hand_over()
        elif not self._flush_due and not self.corked:
            self._flush_due = True
            self._loop.call_soon(self._flush_now)

    def resume(self) -> None:
        """The transport wants more."""
        self.paused = False
        self._unsent_control = 0
        self.pump()
        self.flush()

    def fits(self, size: int) -> bool:
        """Whether a frame of so many bytes may leave now, as far as the connection goes."""
        return size <= self.window and size <= self.max_frame and not self.paused

    def wait(self, stream: Stream) -> None:
        """The stream has something to send, and room in its own window."""
        self.waiting[stream] = None
        self.pump()

    def widen(self, increment: int) -> None:
        """The client grants more to the connection. Raises ConnectionFault if that is too much."""
        self.window += increment
        if self.window > frames.MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window grew too large")
        if self.waiting:
            self.pump()

    def adopt(self, settings: Iterable[tuple[int, int]], streams: Iterable[Stream]) -> None:
        """Keep to the client's settings. Raises ConnectionFault if it cannot want that."""
        for number, value in settings:
            if number == Setting.INITIAL_WINDOW_SIZE:
                self.widen_streams(value, streams)
            elif number == Setting.MAX_FRAME_SIZE:
                if not frames.DEFAULT_MAX_FRAME <= value <= frames.LARGEST_MAX_FRAME:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
                self.max_frame = value
            elif number == Setting.MAX_HEADER_LIST_SIZE:
                self.header_list = value
            elif number == Setting.ENABLE_PUSH and value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")

    def widen_streams(self, window: int, streams: Iterable[Stream]) -> None:
        """The client grants another window to every stream. Raises ConnectionFault likewise."""
        if window > frames.MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {window}")
        more, self.stream_window = window - self.stream_window, window
        for stream in streams:
            self.widen_stream(stream, more)
            if stream.send_window > frames.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window grew too large")

    def widen_stream(self, stream: Stream, increment: int) -> None:
        """The client grants more (or less) to a stream; `pump` makes use of it."""
        stream.send_window += increment
        if stream.send_window <= 0:
            self.waiting.pop(stream, None)
        elif stream.pending_bytes:
            self.waiting[stream] = None

    def pump(self) -> None:
        """Send what waits, a part of each stream in turn."""
        waiting = self.waiting
        while waiting and self.window > 0 and not self.paused:
            stream = next(iter(waiting))
            del waiting[stream]
            stream.advance(_QUANTUM)
            if stream.pending_bytes and stream.send_window > 0:
                waiting[stream] = None  # behind the others
            if self._bytes >= _QUANTUM:  # the transport may have enough now
                self._hand_over()

    def _flush_now(self) -> None:
        self._flush_due = False
        self.flush()
