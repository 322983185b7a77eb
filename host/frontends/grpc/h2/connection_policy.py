"""The timers of an HTTP/2 connection, and limits on clients that cost the server much."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Protocol

from host.frontends.grpc.h2.frames import ConnectionLimits, H2ErrorCode
from host.frontends.grpc.h2.h2_stream import Stream
from host.frontends.grpc.h2.reader import FrameReader
from host.frontends.grpc.methods import GrpcOptions

_MAX_LINGERS = 60
_KEEPALIVE_PING = b"pbalive."
_JITTER = 0.1  # share of the maximum age, so that connections do not all end at once


class TimedConnection(Protocol):
    """The connection as its timers see it. Times are seconds by the clock of the event loop."""

    @property
    def last_received_at(self) -> float:
        """When the connection last received bytes."""

    @property
    def empty_since(self) -> float:
        """When the last stream was closed, if none is open."""

    @property
    def open_streams(self) -> int:
        """The number of open streams."""

    @property
    def data_frames_sent(self) -> int:
        """HEADERS, DATA and WINDOW_UPDATE frames sent."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client's machine has not acknowledged yet."""

    def check_data_rate(self) -> None:
        """Ends streams that send or read too slowly, or closes the connection."""

    def send_keepalive_ping(self, data: bytes) -> None:
        """Sends a PING."""

    def drain(self, text: str = "") -> None:
        """Refuses new streams, and closes when the last one ends."""

    def close(self) -> None:
        """Closes the connection; open streams end with an error."""

    def abort(self) -> None:
        """Closes the connection without sending anything."""


class ConnectionTimers:
    """All timers of a connection."""

    def __init__(
        self, connection: TimedConnection, options: GrpcOptions, limits: ConnectionLimits
    ) -> None:
        self._connection = connection
        self._options = options
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._settings_seen = False
        self._ping_sent_at = 0.0
        self._pings_without_data = 0  # sent since the last data frame
        self._last_data_frames_sent = 0

    def connection_opened(self) -> None:
        """Starts the timers of a new connection."""
        self._set_timer("handshake", self._limits.handshake_timeout, self._connection.abort)
        age = self._options.max_connection_age / 1000
        if age:
            self._set_timer(
                "age", age * random.uniform(1 - _JITTER, 1 + _JITTER), self._max_age_reached
            )

    def settings_received(self) -> None:
        """Ends the handshake; starts keepalive, data rate and idle timers."""
        if self._settings_seen:
            return
        self._settings_seen = True
        self._cancel_timer("handshake")
        self._schedule_keepalive(self._keepalive_time)
        self._check_data_rate()
        if self._limits.idle_timeout:
            self._set_timer("idle", self._limits.idle_timeout, self._check_idle)

    def ping_acknowledged(self, data: bytes) -> None:
        """Handles the answer to a PING."""
        if data == _KEEPALIVE_PING and "keepalive_timeout" in self._timers:
            self._cancel_timer("keepalive_timeout")
            self._schedule_keepalive(self._keepalive_time)

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls `action` after `seconds`, unless the connection is closed by then."""
        self._set_timer(getattr(action, "__name__", "later"), seconds, action)

    def start_linger(self) -> None:
        """Aborts the connection when the client stops reading the last bytes."""
        left, lingered = self._connection.unsent_bytes, 0

        def check_unsent() -> None:
            nonlocal left, lingered
            before, left, lingered = left, self._connection.unsent_bytes, lingered + 1
            if left < before and lingered < _MAX_LINGERS:
                self._set_timer("linger", self._limits.linger_timeout, check_unsent)
            else:
                self._connection.abort()

        self._set_timer("linger", self._limits.linger_timeout, check_unsent)

    def cancel_all(self) -> None:
        """Cancels all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _check_data_rate(self) -> None:
        self._set_timer("data_rate", self._limits.data_rate_interval, self._check_data_rate)
        self._connection.check_data_rate()

    @property
    def _keepalive_time(self) -> float:
        return max(self._options.keepalive_time, 1) / 1000

    def _schedule_keepalive(self, seconds: float) -> None:
        self._set_timer("keepalive", seconds, self._keepalive_due)

    def _keepalive_due(self) -> None:
        connection, options = self._connection, self._options
        now = self._loop.time()
        quiet_until = connection.last_received_at + self._keepalive_time
        if quiet_until > now:
            self._schedule_keepalive(quiet_until - now)
            return
        if connection.data_frames_sent != self._last_data_frames_sent:
            self._last_data_frames_sent, self._pings_without_data = connection.data_frames_sent, 0
        most = options.http2_max_pings_without_data
        allowed = connection.open_streams or options.keepalive_permit_without_calls
        if not allowed or (most and self._pings_without_data >= most):
            self._schedule_keepalive(self._keepalive_time)
            return
        self._pings_without_data += 1
        self._ping_sent_at = now
        connection.send_keepalive_ping(_KEEPALIVE_PING)
        self._set_timer(
            "keepalive_timeout", max(options.keepalive_timeout, 1) / 1000, self._keepalive_timed_out
        )

    def _keepalive_timed_out(self) -> None:
        if self._connection.last_received_at > self._ping_sent_at:
            self._schedule_keepalive(self._keepalive_time)
        else:
            self._connection.abort()

    def _check_idle(self) -> None:
        connection, left = self._connection, self._limits.idle_timeout
        if not connection.open_streams:
            left += connection.empty_since - self._loop.time()
        if left > 0:
            self._set_timer("idle", left, self._check_idle)
        else:
            connection.drain("idle")

    def _max_age_reached(self) -> None:
        self._connection.drain("max_age")
        grace = self._options.max_connection_age_grace / 1000
        if grace:
            self._set_timer("grace", grace, self._connection.close)

    def _set_timer(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self._cancel_timer(name)

        def due() -> None:
            del self._timers[name]
            action()

        self._timers[name] = self._loop.call_later(seconds, due)

    def _cancel_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


_MIN_INTERVAL_WITHOUT_CALLS = 7200.0  # seconds between pings of a client without open calls
_FRAME_KEY = 0  # the incomplete frame of a connection; no stream has this id


class PingPolicy:
    """Limits the client's pings by the rules of gRPC's own servers.

    A ping that arrives too soon after the previous one is a strike. Frames that the server sends
    reset the strikes.
    """

    __slots__ = ("_options", "_strikes", "_last_ping_at", "_data_frames_sent")

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self._strikes = 0
        self._last_ping_at = float("-inf")
        self._data_frames_sent = -1

    def received_ping(self, now: float, data_frames_sent: int, without_calls: bool) -> bool:
        """Counts a ping. Returns True if the client has sent too many.

        Args:
            now: The time of the ping in seconds.
            data_frames_sent: How many HEADERS, DATA and WINDOW_UPDATE frames the server has sent.
            without_calls: Whether the client has no open call.
        """
        options = self._options
        if data_frames_sent != self._data_frames_sent:
            self._data_frames_sent = data_frames_sent
            self._strikes, self._last_ping_at = 0, float("-inf")
        if without_calls and not options.keepalive_permit_without_calls:
            interval = _MIN_INTERVAL_WITHOUT_CALLS
        else:
            interval = options.http2_min_recv_ping_interval_without_data / 1000
        too_soon = now < self._last_ping_at + interval
        self._last_ping_at = now
        if not too_soon:
            return False
        self._strikes += 1
        most = options.http2_max_ping_strikes
        return most != 0 and self._strikes > most


class MinDataRate:
    """Requires a minimum data rate of requests and frames that have arrived in part."""

    def __init__(
        self, streams: Mapping[int, Stream], reader: FrameReader, limits: ConnectionLimits
    ) -> None:
        self._streams = streams
        self._reader = reader
        self._min_bytes = limits.min_interval_bytes
        self._last_counts: dict[int, int] = {}  # received bytes by stream at the last check
        self._last_unread: dict[int, int] = {}  # pending bytes by stream at the last check

    def reset_slow_streams(self, window: int) -> bool:
        """Ends the streams that received less than the minimum since the last check.

        Returns whether the incomplete frame of the connection was as slow. `window` is the
        connection's receive window in bytes; a client without window cannot send, and is not slow.
        """
        now: dict[int, int] = {}
        if window >= self._min_bytes:
            incoming = ((id, stream.incoming_bytes) for id, stream in self._streams.items())
            now = {id: size for id, size in incoming if size is not None}
            if self._reader.in_frame:
                now[_FRAME_KEY] = self._reader.bytes_received
        before, self._last_counts = self._last_counts, now
        slow = [id for id, n in now.items() if id in before and n - before[id] < self._min_bytes]
        for id in slow:
            if id in self._streams:
                self._streams[id].on_too_slow()
        return _FRAME_KEY in slow

    def reset_unread_responses(self) -> None:
        """Resets the streams whose client has read nothing of its response since the last check."""
        unread = ((id, stream.unread_bytes) for id, stream in self._streams.items())
        before, self._last_unread = self._last_unread, {id: size for id, size in unread if size}
        for id, size in self._last_unread.items():
            if before.get(id) == size:
                self._streams[id].reset(H2ErrorCode.CANCEL)
