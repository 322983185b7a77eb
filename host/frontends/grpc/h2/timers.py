"""The timers of an HTTP/2 connection: handshake, keepalive, age, idle time, closing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from host.frontends.grpc.h2.limits import ConnectionLimits
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
