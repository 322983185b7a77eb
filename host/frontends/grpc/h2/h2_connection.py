"""The server's end of an HTTP/2 connection: streams, receive window, errors and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from host.access.clients import TokenBucket
from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.connection_policy import ConnectionTimers, MinDataRate, PingPolicy
from host.frontends.grpc.h2.frames import ConnectionLimits, H2ConnectionError, H2ErrorCode, Setting
from host.frontends.grpc.h2.grpc_messages import ReceivedMessage
from host.frontends.grpc.h2.h2_stream import NO_DEADLINE, Route, Stream
from host.frontends.grpc.h2.headers import Fields, HeaderDecoder, MalformedRequest
from host.frontends.grpc.h2.hpack import UsualRequest
from host.frontends.grpc.h2.reader import FrameReader
from host.frontends.grpc.h2.send_buffer import SendBuffer
from host.frontends.grpc.methods import GrpcOptions
from host.frontends.receive_memory import Piece, ReceiveBudget
from host.frontends.sockets import unsent_bytes

if TYPE_CHECKING:
    from host.lane._lane import RequestFrames

_log = logging.getLogger("pbhost")

_DRAIN_PING = b"pbdrain."
_MAX_RESET_STREAMS = 1024  # remembered streams that were reset while the client was sending
_STREAMS_PER_TOKEN = 64  # changing the window of this many streams costs as much as a frame
_MAX_SETTINGS = 128  # per frame
_CLOCK_RESOLUTION = 0.001  # seconds; timers of uvloop are due at whole milliseconds
_MIN_REQUEST_BYTES = 48  # bytes; smaller inputs are control frames


def _end_exceeded(stream: Stream) -> None:
    if not stream.closed:
        stream.on_deadline()


class H2Connection(FrameReader, asyncio.Protocol):
    """The server's end of an HTTP/2 connection. It raises no exception into the event loop.

    Args:
        route: Finds the Route of a request: `Router.route`.
        options: Options of the gRPC endpoint.
        limits: Limits of the connection.
        on_opened: Called when the client is connected and TLS is established.
        on_closed: Called when the connection is closed.
        on_activity: Called with each input that may hold a request, before the input is read.
        receive_budget: Limits the memory of the requests of all connections.
    """

    def __init__(
        self,
        route: Callable[[Fields, int, UsualRequest | None], Route],
        options: GrpcOptions,
        limits: ConnectionLimits,
        on_opened: Callable[[H2Connection], None],
        on_closed: Callable[[H2Connection], None],
        on_activity: Callable[[], None],
        receive_budget: ReceiveBudget,
    ) -> None:
        super().__init__(limits)
        self.receive_budget = receive_budget
        self.streams: dict[int, Stream] = {}
        self.send_buffer = SendBuffer(limits)
        self.loop = asyncio.get_running_loop()
        # Times in seconds, by the clock of the loop:
        self.last_received_at = 0.0
        self.empty_since = self.loop.time()  # if no stream is open
        self._on_opened = on_opened
        self._on_closed = on_closed
        self._on_activity = on_activity
        self._header_decoder = HeaderDecoder(route, limits.header_list_hard_limit)
        self._known_blocks = self._header_decoder.known
        self._ping_policy = PingPolicy(options)
        self._timers = ConnectionTimers(self, options, limits)
        self._min_data_rate = MinDataRate(self.streams, self, limits)
        self._transport: asyncio.Transport | None = None
        self._last_stream = 0
        self._recv_window = frames.DEFAULT_WINDOW
        self._most_unacknowledged = limits.connection_window // 2
        self.unacknowledged_bytes = 0
        self._reset_streams: dict[int, None] = {}
        self._reset_bucket = TokenBucket(*limits.reset_rate)
        self._no_op_frames = TokenBucket(*limits.no_op_frame_rate)
        self.deadlines_due = NO_DEADLINE
        self._draining = False
        self._refusing_streams = False  # the final GOAWAY is sent
        self._closing = False  # further input is ignored
        self._turn_over = False  # the rest of the input waits for the next turn of the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        limits = self.limits
        self._transport = cast(asyncio.Transport, transport)
        self.send_buffer.attach_transport(self._transport)
        self.send_buffer.write(
            frames.settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
                    Setting.MAX_FRAME_SIZE: limits.max_frame,
                    Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list,
                }
            )
        )
        if (extra := limits.connection_window - self._recv_window) > 0:
            self._recv_window += extra
            self.send_buffer.write(frames.window_update(0, extra))
        self.send_buffer.flush()
        self._timers.connection_opened()
        self._on_opened(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if data:  # otherwise the rest of what came before
            self.last_received_at = self.loop.time()
            if len(data) >= _MIN_REQUEST_BYTES:
                self._on_activity()
        send_buffer = self.send_buffer
        send_buffer.corked = True
        try:
            self.feed(data)
        except H2ConnectionError as fault:
            self._close_with_error(fault.code, fault.text)
        except Exception:  # a bug must close this connection only
            _log.exception("unexpected failure of a gRPC connection")
            self._close_with_error(H2ErrorCode.INTERNAL_ERROR, "unexpected failure")
        send_buffer.corked = False
        if self.unacknowledged_bytes >= self._most_unacknowledged:
            self.acknowledge_received_data(0)
        if send_buffer.buffered_bytes:
            send_buffer.flush()
        if self.paused and not self._turn_over:
            self._end_turn()

    def _end_turn(self) -> None:
        """Lets other connections have their turn before the rest of the input is read."""
        self._turn_over = True
        if self._transport is not None:
            self._transport.pause_reading()
        self.loop.call_soon(self._continue_reading)

    def _continue_reading(self) -> None:
        self._turn_over = False
        self.data_received(b"")
        transport = self._transport
        if not self._turn_over and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._transport = None
        self.send_buffer.flush_and_close()
        self._timers.cancel_all()
        self._abort_streams()
        self._on_closed(self)

    def pause_writing(self) -> None:
        self.send_buffer.writing_paused = True

    def resume_writing(self) -> None:
        self.send_buffer.resume_writing()

    def acknowledge_received_data(self, size: int) -> None:
        """Acknowledges received bytes to the window of the connection."""
        self.unacknowledged_bytes += size
        if self.unacknowledged_bytes >= self._most_unacknowledged:
            self._recv_window += self.unacknowledged_bytes
            self.send_buffer.data_frames_sent += 1
            self.send_buffer.write(frames.window_update(0, self.unacknowledged_bytes))
            self.unacknowledged_bytes = 0

    def stop_request(self, stream: Stream) -> None:
        """Tells a client that still sends its request to stop, as the response is sent."""
        self.send_buffer.write(frames.rst_stream(stream.id, H2ErrorCode.NO_ERROR))
        self._remember_reset_stream(stream.id)

    def reset_stream(self, stream_id: int, code: H2ErrorCode) -> None:
        """Resets a stream at once."""
        self.send_buffer.write(frames.rst_stream(stream_id, code))
        self._remember_reset_stream(stream_id)
        if (stream := self.streams.get(stream_id)) is not None:
            self.remove_stream(stream)
            stream.on_aborted()

    @property
    def open_streams(self) -> int:
        """The number of open streams."""
        return len(self.streams)

    @property
    def data_frames_sent(self) -> int:
        """HEADERS, DATA and WINDOW_UPDATE frames sent."""
        return self.send_buffer.data_frames_sent

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client's machine has not acknowledged yet."""
        return unsent_bytes(self._transport)

    def drain(self, text: str = "") -> None:
        """Starts a graceful shutdown: refuses new streams, and closes when the last one ends."""
        if self._draining or self._closing:
            return
        self._draining = True
        self.send_buffer.write(frames.goaway(frames.MAX_STREAM, H2ErrorCode.NO_ERROR, text))
        self.send_buffer.write(frames.ping(_DRAIN_PING, False))
        self.send_buffer.flush()
        # Streams that the client opens before it reads the GOAWAY are still served.
        self._timers.call_later(self.limits.linger_timeout, self._refuse_streams)

    def close(self, code: H2ErrorCode = H2ErrorCode.NO_ERROR, text: str = "") -> None:
        """Closes the connection; open streams end with an error or are reset."""
        if self._closing:
            return
        for stream in list(self.streams.values()):
            stream.end_unavailable()
        self._close_with_error(code, text)
        self.send_buffer.flush()

    def abort(self) -> None:
        """Closes the connection without sending anything."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def check_data_rate(self) -> None:
        """Ends streams that send or read too slowly, or closes the connection."""
        self._min_data_rate.reset_unread_responses()
        self.send_buffer.flush()
        if self._min_data_rate.reset_slow_streams(self._recv_window):
            self.close(H2ErrorCode.ENHANCE_YOUR_CALM, "too slow")

    def send_keepalive_ping(self, data: bytes) -> None:
        """Sends a PING."""
        self.send_buffer.write(frames.ping(data, False))
        self.send_buffer.flush()

    def _refuse_streams(self) -> None:
        if self._refusing_streams or self._closing:
            return
        self._refusing_streams = True
        self.send_buffer.write(frames.goaway(self._last_stream, H2ErrorCode.NO_ERROR))
        self.send_buffer.flush()
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._refusing_streams and not self.streams and not self._closing:
            self._close_when_sent()

    def _close_with_error(self, code: H2ErrorCode, text: str) -> None:
        self.send_buffer.write(frames.goaway(self._last_stream, code, text))
        self._close_when_sent()
        self._abort_streams()

    def _close_when_sent(self) -> None:
        """Ignores further input and closes when everything is sent."""
        self._closing = True
        self.send_buffer.flush_and_close()
        transport = self._transport
        if transport is None:
            return
        try:
            if transport.can_write_eof():
                # Closing a socket with unread input makes the kernel drop the GOAWAY.
                transport.write_eof()
            else:
                transport.close()
        except OSError:  # the client has reset the connection
            transport.abort()
        self._timers.start_linger()

    def watch_deadlines(self, due: float, seconds: float) -> None:
        """Looks at the deadlines of all streams in `seconds` seconds, when one is due."""
        self.deadlines_due = due
        self._timers.call_later(seconds, self._check_deadlines)

    def _check_deadlines(self) -> None:
        """Ends the streams whose deadline has passed, and waits for the next one."""
        # One timer for all: most calls end long before their deadlines.
        now = self.loop.time()
        streams = list(self.streams.values())
        exceeded = [stream for stream in streams if stream.deadline <= now + _CLOCK_RESOLUTION]
        for stream in exceeded:
            stream.deadline = NO_DEADLINE
        self.deadlines_due = NO_DEADLINE
        due = min((stream.deadline for stream in streams), default=NO_DEADLINE)
        if due < NO_DEADLINE:
            self.watch_deadlines(due, due - now)
        for stream in exceeded:
            # Each by itself: a defect of one call must not keep the others from ending.
            self.loop.call_soon(_end_exceeded, stream)

    def _abort_streams(self) -> None:
        for stream in list(self.streams.values()):
            self.remove_stream(stream)
            stream.on_aborted()

    def remove_stream(self, stream: Stream) -> None:
        """Removes a stream that is complete, or reset."""
        self.streams.pop(stream.id, None)
        self.send_buffer.waiting_streams.pop(stream, None)
        stream.mark_closed()
        if not self.streams:
            self.empty_since = self.loop.time()
            if self._refusing_streams:
                self._close_if_drained()

    def _remember_reset_stream(self, stream_id: int) -> None:
        self._reset_streams[stream_id] = None
        if len(self._reset_streams) > _MAX_RESET_STREAMS:
            del self._reset_streams[next(iter(self._reset_streams))]

    def on_headers(self, stream: int, block: bytes, end: bool) -> None:
        """Opens a stream for a request, or handles the trailers of a request."""
        if not stream & 1:
            raise H2ConnectionError(
                H2ErrorCode.PROTOCOL_ERROR, "a client's stream with an even number"
            )
        known = self.streams.get(stream)
        if stream <= self._last_stream or known is not None:
            self._on_trailers(stream, known, block, end)
            return
        self._last_stream = stream
        route = self._known_blocks.get(block)
        if route is None:
            try:
                route = self._header_decoder.decode_request(block)
            except MalformedRequest:
                self.on_stream_error(stream, H2ErrorCode.PROTOCOL_ERROR)
                return
        if self._refusing_streams or len(self.streams) >= self.limits.max_streams:
            self.on_stream_error(stream, H2ErrorCode.REFUSED_STREAM)
            return
        opened = self.streams[stream] = route.stream(self, stream)
        if end or route.acts_at_once:
            opened.remote_ended = end
            opened.on_opened()
            if end and not opened.closed:
                self._end_request(opened)

    def on_request(self, request: RequestFrames) -> bool:
        """As `on_headers`, `on_window_update` and `on_data`, if it keeps all of their rules."""
        _, stream, block, message, size, increment, connection_increment = request
        self.on_headers(stream, block, False)
        opened = self.streams.get(stream)
        send_buffer = self.send_buffer
        if (
            opened is None
            or not opened.takes_message
            or opened.remaining_length is not None
            or opened.remote_ended
            or size > self._recv_window
            or size > opened.recv_window
            or increment + opened.send_window > frames.MAX_WINDOW
        ):
            return False
        opened.send_window += increment
        self._recv_window -= size
        opened.recv_window -= size
        self.unacknowledged_bytes += size
        opened.remote_ended = True
        opened.on_message(message)
        if connection_increment:
            send_buffer.increase_window(connection_increment)
        return True

    def on_messages(
        self, stop: int, stream: int, messages: Sequence[ReceivedMessage], size: int
    ) -> bool:
        """As `on_data`, if it keeps all of its rules."""
        known = self.streams.get(stream)
        if (
            known is None
            or not known.at_message_boundary
            or known.remaining_length is not None
            or known.remote_ended
            or size > self._recv_window
            or size > known.recv_window
        ):
            return False
        self._recv_window -= size
        known.recv_window -= size
        known.on_messages(messages, size)
        return True

    def _on_trailers(self, stream: int, known: Stream | None, block: bytes, end: bool) -> None:
        if known is None:
            if stream not in self._reset_streams:
                raise H2ConnectionError(H2ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
            self._header_decoder.skip_block(block)
            return
        try:
            self._header_decoder.decode_trailers(block)
        except MalformedRequest:
            end = False
        if known.remote_ended:
            self.on_stream_error(stream, H2ErrorCode.STREAM_CLOSED)
        elif not end:
            self.on_stream_error(stream, H2ErrorCode.PROTOCOL_ERROR)
        else:
            known.remote_ended = True
            self._end_request(known)

    def _end_request(self, stream: Stream) -> None:
        """Ends a request by headers or trailers, without data."""
        if stream.remaining_length:
            self.on_stream_error(stream.id, H2ErrorCode.PROTOCOL_ERROR)
        else:
            stream.on_data(b"", 0, True)

    def on_data(self, stream: int, piece: Piece, size: int, end: bool) -> None:
        """Passes data of a request to its stream."""
        self._recv_window -= size
        if self._recv_window < 0:
            raise H2ConnectionError(H2ErrorCode.FLOW_CONTROL_ERROR, "more data than was granted")
        known = self.streams.get(stream)
        if known is None or known.remote_ended:
            self._on_data_of_unknown_stream(stream, size, end)
            return
        known.recv_window -= size
        if known.recv_window < 0:
            self.acknowledge_received_data(size)
            self.on_stream_error(stream, H2ErrorCode.FLOW_CONTROL_ERROR)
            return
        if not piece and not end:
            self.on_no_op_frame()
        if known.remaining_length is not None:  # RFC 9113 section 8.1.1; padding does not count
            known.remaining_length -= len(piece)
            if known.remaining_length < 0 or (end and known.remaining_length):
                self.acknowledge_received_data(size)
                self.on_stream_error(stream, H2ErrorCode.PROTOCOL_ERROR)
                return
        known.remote_ended = end
        known.on_data(piece, size, end)

    def _on_data_of_unknown_stream(self, stream: int, size: int, end: bool) -> None:
        self._check_not_idle(stream, "DATA")
        self.acknowledge_received_data(size)
        if stream in self._reset_streams:
            if end:
                del self._reset_streams[stream]
            return
        self.on_stream_error(stream, H2ErrorCode.STREAM_CLOSED)

    def on_settings(self, values: list[tuple[int, int]]) -> None:
        """Applies the client's settings and acknowledges them."""
        self.on_no_op_frame()
        if len(values) > _MAX_SETTINGS:
            raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, f"{len(values)} settings")
        self._timers.settings_received()
        window = self.send_buffer.stream_window
        self.send_buffer.apply_settings(values, self.streams.values())
        if self.send_buffer.stream_window != window:
            self._count_no_op(len(self.streams) // _STREAMS_PER_TOKEN)
        self.send_buffer.write_control_frame(frames.SETTINGS_ACK)
        self.send_buffer.send_waiting()

    def on_settings_ack(self) -> None:
        """Counts the frame only: the server's settings take effect without an acknowledgement."""
        self.on_no_op_frame()

    def on_ping(self, data: bytes, ack: bool) -> None:
        """Answers a PING, or handles the answer to one."""
        self.on_no_op_frame()
        if ack:
            self._timers.ping_acknowledged(data)
            if data == _DRAIN_PING and self._draining:
                self._refuse_streams()
            return
        if self._ping_policy.received_ping(
            self.loop.time(), self.send_buffer.data_frames_sent, not self.streams
        ):
            for stream in list(self.streams.values()):
                stream.end_unavailable("Too many pings")
            raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self.send_buffer.write_control_frame(frames.ping(data, True))

    def on_window_update(self, stream: int, increment: int) -> None:
        """Increases the send window of a stream or of the connection, and sends pending data."""
        if not stream:
            self.send_buffer.increase_window(increment)
            return
        known = self.streams.get(stream)
        if known is None:
            self._check_not_idle(stream, "WINDOW_UPDATE")
        elif known.send_window + increment > frames.MAX_WINDOW:
            self.on_stream_error(stream, H2ErrorCode.FLOW_CONTROL_ERROR)
        else:
            self.send_buffer.increase_stream_window(known, increment)
            if self.send_buffer.waiting_streams:
                self.send_buffer.send_waiting()

    def on_rst_stream(self, stream: int) -> None:
        """Cancels a request that the client has reset."""
        self._count_reset()
        known = self.streams.get(stream)
        if known is None:
            # gRPC's own client resets idle streams, although RFC 9113 section 5.1 forbids it.
            if not stream & 1:
                self._check_not_idle(stream, "RST_STREAM")
            self._reset_streams.pop(stream, None)
            return
        self.remove_stream(known)
        known.on_aborted()

    def on_goaway(self, code: int) -> None:
        """Counts the frame only: the client will close the connection."""
        self.on_no_op_frame()

    def on_no_op_frame(self) -> None:
        """Counts a frame without effect. Raises H2ConnectionError if there are too many."""
        self._count_no_op(1)

    def _count_no_op(self, cost: int) -> None:
        if not self._no_op_frames.consume(cost):
            raise H2ConnectionError(
                H2ErrorCode.ENHANCE_YOUR_CALM, "too many frames that do nothing"
            )

    def on_stream_error(self, stream: int, code: H2ErrorCode) -> None:
        """Resets a stream because the client has broken a rule.

        Raises H2ConnectionError if the stream is idle, or if too many streams were reset.
        """
        if stream > self._last_stream or not stream & 1:
            raise H2ConnectionError(code, "a wrong frame on a stream that is not open")
        self._count_reset()
        self.reset_stream(stream, code)

    def _count_reset(self) -> None:
        if not self._reset_bucket.consume():
            raise H2ConnectionError(H2ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset")

    def _check_not_idle(self, stream: int, name: str) -> None:
        if stream > self._last_stream or not stream & 1:
            raise H2ConnectionError(
                H2ErrorCode.PROTOCOL_ERROR, f"{name} on a stream that is not open"
            )
