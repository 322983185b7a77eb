"""One client's connection: its streams, its windows, and what both ends have promised."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import ConnectionFault, ErrorCode, Setting
from host.frontends.grpc.h2.headers import Fields, HeaderReader, Malformed
from host.frontends.grpc.h2.lifetime import Lifetime
from host.frontends.grpc.h2.limits import Limits
from host.frontends.grpc.h2.min_data_rate import Pace
from host.frontends.grpc.h2.pings import PingPolicy
from host.frontends.grpc.h2.reader import FrameReader, Piece
from host.frontends.grpc.h2.send_buffer import Outbox
from host.frontends.grpc.h2.stream import Route, Stream
from host.frontends.grpc.h2.token_bucket import Budget
from host.frontends.grpc.methods import GrpcOptions
from host.frontends.sockets import unsent

_log = logging.getLogger("pbhost")

_DRAIN_PING = b"pbdrain."
_ENDED_EARLY = 1024  # streams that were ended while their client was still sending
_MOST_SETTINGS = 128  # in one frame
_LEAST_REQUEST = 48  # bytes; less are frames that control something


class Connection(asyncio.Protocol):
    """The server's end of an HTTP/2 connection. It raises nothing into the event loop.

    `understand` makes a Route of the fields of a request and their size. `made` is called when
    the client is connected, and TLS set up; `gone` when it is not any more. `heard` is called when
    it may have sent a request, before that is read.
    """

    def __init__(
        self,
        understand: Callable[[Fields, int], Route],
        options: GrpcOptions,
        limits: Limits,
        made: Callable[[Connection], None],
        gone: Callable[[Connection], None],
        heard: Callable[[], None],
    ) -> None:
        self.limits = limits
        self.streams: dict[int, Stream] = {}
        self.out = Outbox(limits)
        self.heard_at = 0.0  # when the last bytes came
        self.loop = asyncio.get_running_loop()
        self._made = made
        self._gone = gone
        self._heard = heard
        self._reader = FrameReader(self, limits)
        self._headers = HeaderReader(understand, limits.header_list_end)
        self._pings = PingPolicy(options)
        self._lifetime = Lifetime(self, options, limits)
        self._pace = Pace(self.streams, self._reader, limits)
        self._transport: asyncio.Transport | None = None
        self._last_stream = 0
        self._recv_window = frames.DEFAULT_WINDOW
        self._uncredited = 0
        self._ended_early: dict[int, None] = {}
        self._resets = Budget(*limits.resets)
        self._idle = Budget(*limits.idle_frames)
        self._draining = False
        self._refusing = False  # new streams; the last GOAWAY is sent
        self._over = False  # nothing more is read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        limits = self.limits
        self._transport = cast(asyncio.Transport, transport)
        self.out.open(self._transport)
        self.out.write(
            frames.settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
                    Setting.MAX_FRAME_SIZE: limits.max_frame,
                    Setting.MAX_HEADER_LIST_SIZE: limits.header_list,
                }
            )
        )
        if (extra := limits.connection_window - self._recv_window) > 0:
            self._recv_window += extra
            self.out.write(frames.window_update(0, extra))
        self.out.flush()
        self._lifetime.begin()
        self._made(self)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self.heard_at = self.loop.time()
        if len(data) >= _LEAST_REQUEST:
            self._heard()
        self.out.corked = True
        try:
            self._reader.feed(data)
        except ConnectionFault as fault:
            self._fail(fault.code, fault.text)
        except Exception:  # a defect: logged, and this connection is closed
            _log.exception("unexpected failure of a gRPC connection")
            self._fail(ErrorCode.INTERNAL_ERROR, "unexpected failure")
        self.out.corked = False
        self.out.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._over = True
        self._transport = None
        self.out.close()
        self._lifetime.end()
        self._abort_streams()
        self._gone(self)

    def pause_writing(self) -> None:
        self.out.paused = True

    def resume_writing(self) -> None:
        self.out.resume()

    def credit(self, size: int) -> None:
        """Grant so many received bytes anew."""
        self._uncredited += size
        if self._uncredited >= self.limits.connection_window // 2:
            self._recv_window += self._uncredited
            self.out.sent_data += 1
            self.out.write(frames.window_update(0, self._uncredited))
            self._uncredited = 0

    def finished(self, stream: Stream) -> None:
        """The response is sent. A client that still sends is told that nobody reads it."""
        if not stream.remote_ended:
            self.out.write(frames.rst_stream(stream.id, ErrorCode.NO_ERROR))
            self._remember(stream.id)
        self._forget(stream)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """End a stream at once."""
        self.out.write(frames.rst_stream(stream_id, code))
        self._remember(stream_id)
        if (stream := self.streams.get(stream_id)) is not None:
            self._forget(stream)
            stream.aborted()

    @property
    def open_streams(self) -> int:
        """How many requests are being served."""
        return len(self.streams)

    @property
    def sent_data(self) -> int:
        """How many frames of data it has sent."""
        return self.out.sent_data

    @property
    def unsent(self) -> int:
        """Bytes that the client's machine has not taken yet."""
        return unsent(self._transport)

    def drain(self, text: str = "") -> None:
        """Accept no more streams, as soon as the client can know; close when none is left."""
        if self._draining or self._over:
            return
        self._draining = True
        self.out.write(frames.goaway(frames.MAX_STREAM, ErrorCode.NO_ERROR, text))
        self.out.write(frames.ping(_DRAIN_PING, False))
        self.out.flush()
        # What the client opened before it has read this is served still.
        self._lifetime.after(self.limits.linger, self._refuse_streams)

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR, text: str = "") -> None:
        """End it: what streams are open end with an error, or are given up."""
        if self._over:
            return
        for stream in list(self.streams.values()):
            stream.unavailable()
        self._fail(code, text)
        self.out.flush()

    def abort(self) -> None:
        """Close it without another word."""
        self._over = True
        if self._transport is not None:
            self._transport.abort()

    def check_pace(self) -> None:
        """Give up what the client has begun, and does not go on with."""
        if self._pace.check(self._recv_window):
            self.close(ErrorCode.ENHANCE_YOUR_CALM, "too slow")

    def ask_alive(self, data: bytes) -> None:
        """Send a PING."""
        self.out.write(frames.ping(data, False))
        self.out.flush()

    def _refuse_streams(self) -> None:
        if self._refusing or self._over:
            return
        self._refusing = True
        self.out.write(frames.goaway(self._last_stream, ErrorCode.NO_ERROR))
        self.out.flush()
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._refusing and not self.streams and not self._over:
            self._end()

    def _fail(self, code: ErrorCode, text: str) -> None:
        self.out.write(frames.goaway(self._last_stream, code, text))
        self._end()
        self._abort_streams()

    def _end(self) -> None:
        """Read nothing more, and close when all is sent."""
        self._over = True
        self.out.close()
        transport = self._transport
        if transport is None:
            return
        if transport.can_write_eof():
            # If it were closed with something unread, the kernel would take the reason back.
            transport.write_eof()
        else:
            transport.close()
        self._lifetime.linger()

    def _abort_streams(self) -> None:
        for stream in list(self.streams.values()):
            self._forget(stream)
            stream.aborted()

    def _forget(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        self.out.waiting.pop(stream, None)
        stream.close()
        if not self.streams:
            self._lifetime.no_streams()
            self._close_if_drained()

    def _remember(self, stream_id: int) -> None:
        self._ended_early[stream_id] = None
        if len(self._ended_early) > _ENDED_EARLY:
            del self._ended_early[next(iter(self._ended_early))]

    def headers(self, stream: int, block: bytes, end: bool) -> None:
        """A request, or the trailers of one."""
        if not stream & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client's stream with an even number")
        known = self.streams.get(stream)
        if stream <= self._last_stream or known is not None:
            self._trailers(stream, known, block, end)
            return
        self._last_stream = stream
        try:
            route = self._headers.request(block)
        except Malformed:
            self.refuse(stream, ErrorCode.PROTOCOL_ERROR)
            return
        if self._refusing or len(self.streams) >= self.limits.max_streams:
            self.refuse(stream, ErrorCode.REFUSED_STREAM)
            return
        opened = self.streams[stream] = route.open(self, stream)
        opened.remote_ended = end
        opened.begin()
        if end and not opened.closed:
            opened.received(b"", 0, True)

    def _trailers(self, stream: int, known: Stream | None, block: bytes, end: bool) -> None:
        if known is None:
            if stream not in self._ended_early:
                raise ConnectionFault(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
            self._headers.skip(block)
            return
        try:
            self._headers.trailers(block)
        except Malformed:
            end = False
        if known.remote_ended:
            self.refuse(stream, ErrorCode.STREAM_CLOSED)
        elif not end:
            self.refuse(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            known.remote_ended = True
            known.received(b"", 0, True)

    def data(self, stream: int, piece: Piece, size: int, end: bool) -> None:
        """Bytes of a request."""
        self._recv_window -= size
        if self._recv_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than was granted")
        known = self.streams.get(stream)
        if known is None or known.remote_ended:
            self._stray_data(stream, size, end)
            return
        known.recv_window -= size
        if known.recv_window < 0:
            self.credit(size)
            self.refuse(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if not piece and not end:
            self.idle()
        known.remote_ended = end
        known.received(piece, size, end)

    def _stray_data(self, stream: int, size: int, end: bool) -> None:
        self._check_not_idle(stream, "DATA")
        self.credit(size)
        if stream in self._ended_early:
            if end:
                del self._ended_early[stream]
            return
        self.refuse(stream, ErrorCode.STREAM_CLOSED)

    def settings(self, values: list[tuple[int, int]]) -> None:
        """The client's settings; they apply at once."""
        self.idle()
        if len(values) > _MOST_SETTINGS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"{len(values)} settings")
        self._lifetime.greeted()
        self.out.adopt(values, self.streams.values())
        self.out.control(frames.SETTINGS_ACK)
        self.out.pump()

    def settings_ack(self) -> None:
        """Ours have arrived: nothing depends on it, as all of them only grant."""
        self.idle()

    def ping(self, data: bytes, ack: bool) -> None:
        """Answer; or note that the client has."""
        self.idle()
        if ack:
            self._lifetime.answered(data)
            if data == _DRAIN_PING and self._draining:
                self._refuse_streams()
            return
        if self._pings.abused(self.loop.time(), self.out.sent_data, not self.streams):
            for stream in list(self.streams.values()):
                stream.unavailable("Too many pings")
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self.out.control(frames.ping(data, True))

    def window_update(self, stream: int, increment: int) -> None:
        """Room for more."""
        if not stream:
            self.out.widen(increment)
            return
        known = self.streams.get(stream)
        if known is None:
            self._check_not_idle(stream, "WINDOW_UPDATE")
        elif known.send_window + increment > frames.MAX_WINDOW:
            self.refuse(stream, ErrorCode.FLOW_CONTROL_ERROR)
        else:
            self.out.widen_stream(known, increment)
            if self.out.waiting:
                self.out.pump()

    def peer_reset(self, stream: int) -> None:
        """The client has given a request up."""
        self._spend_reset()
        known = self.streams.get(stream)
        if known is None:
            # Against RFC 9113 5.1, gRPC's own client resets what it has not even begun.
            if not stream & 1:
                self._check_not_idle(stream, "RST_STREAM")
            self._ended_early.pop(stream, None)
            return
        self._forget(known)
        known.aborted()

    def goaway(self, code: int) -> None:
        """The client opens no more streams; it will close."""
        self.idle()

    def idle(self) -> None:
        """A frame that does nothing; only so many are taken."""
        if not self._idle.spend():
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that do nothing")

    def refuse(self, stream: int, code: ErrorCode) -> None:
        """Reset a stream for what the client did; only so many are taken."""
        if stream > self._last_stream or not stream & 1:
            raise ConnectionFault(code, "a wrong frame on a stream that is not open")
        self._spend_reset()
        self.reset(stream, code)

    def _spend_reset(self) -> None:
        if not self._resets.spend():
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset")

    def _check_not_idle(self, stream: int, name: str) -> None:
        if stream > self._last_stream or not stream & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{name} on a stream that is not open")
