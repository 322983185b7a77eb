"""When a connection is asked whether it is alive, told to end, and ended: its timers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from host.frontends.grpc.h2.limits import Limits
from host.frontends.grpc.methods import GrpcOptions

_MOST_LINGERS = 60
_PING = b"pbalive."
_JITTER = 0.1  # of the greatest age, so that connections made together do not end together


class TimedConnection(Protocol):
    """The connection, as its timers see it. Times are those of its event loop, in seconds."""

    @property
    def heard_at(self) -> float:
        """When it last received something."""

    @property
    def open_streams(self) -> int:
        """How many requests are being served."""

    @property
    def sent_data(self) -> int:
        """How many frames of data it has sent."""

    @property
    def unsent(self) -> int:
        """Bytes that the client's machine has not taken yet."""

    def check_pace(self) -> None:
        """Give up what the client has begun, and does not go on with."""

    def ask_alive(self, data: bytes) -> None:
        """Send a PING."""

    def drain(self, text: str = "") -> None:
        """End when no stream is left; accept no new ones."""

    def close(self) -> None:
        """End now."""

    def abort(self) -> None:
        """End without a word."""


class Lifetime:
    """All timers of one connection. `end` cancels them."""

    def __init__(self, connection: TimedConnection, options: GrpcOptions, limits: Limits) -> None:
        self._connection = connection
        self._options = options
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._greeted = False
        self._asked_at = 0.0
        self._pings = 0  # sent since data was
        self._sent_data = 0
        self._empty_since = 0.0

    def begin(self) -> None:
        """The connection is there; its client has said nothing yet."""
        self._set("handshake", self._limits.handshake, self._connection.abort)
        age = self._options.max_connection_age / 1000
        if age:
            self._set("age", age * random.uniform(1 - _JITTER, 1 + _JITTER), self._too_old)

    def greeted(self) -> None:
        """The client's settings have come."""
        if self._greeted:
            return
        self._greeted = True
        self._cancel("handshake")
        self._watch(self._keepalive_time)
        self._check_pace()
        self.no_streams()

    def no_streams(self) -> None:
        """The last stream has ended, or none has begun."""
        if self._limits.idle:
            self._empty_since = self._loop.time()
            if "idle" not in self._timers:
                self._set("idle", self._limits.idle, self._check_idle)

    def answered(self, data: bytes) -> None:
        """An answer to a PING came."""
        if data == _PING and "answer" in self._timers:
            self._cancel("answer")
            self._watch(self._keepalive_time)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later, unless the connection is gone by then."""
        self._set(getattr(action, "__name__", "later"), seconds, action)

    def linger(self) -> None:
        """All is written: abort when the client has taken nothing of it for a while."""
        left, lingered = self._connection.unsent, 0

        def look() -> None:
            nonlocal left, lingered
            before, left, lingered = left, self._connection.unsent, lingered + 1
            if left < before and lingered < _MOST_LINGERS:
                self._set("linger", self._limits.linger, look)
            else:
                self._connection.abort()

        self._set("linger", self._limits.linger, look)

    def end(self) -> None:
        """The connection is gone."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _check_pace(self) -> None:
        self._set("pace", self._limits.pause, self._check_pace)
        self._connection.check_pace()

    @property
    def _keepalive_time(self) -> float:
        return max(self._options.keepalive_time, 1) / 1000

    def _watch(self, seconds: float) -> None:
        self._set("keepalive", seconds, self._check_alive)

    def _check_alive(self) -> None:
        connection, options = self._connection, self._options
        now = self._loop.time()
        quiet_until = connection.heard_at + self._keepalive_time
        if quiet_until > now:
            self._watch(quiet_until - now)
            return
        if connection.sent_data != self._sent_data:
            self._sent_data, self._pings = connection.sent_data, 0
        most = options.http2_max_pings_without_data
        allowed = connection.open_streams or options.keepalive_permit_without_calls
        if not allowed or (most and self._pings >= most):
            self._watch(self._keepalive_time)
            return
        self._pings += 1
        self._asked_at = now
        connection.ask_alive(_PING)
        self._set("answer", max(options.keepalive_timeout, 1) / 1000, self._no_answer)

    def _no_answer(self) -> None:
        if self._connection.heard_at > self._asked_at:
            self._watch(self._keepalive_time)
        else:
            self._connection.abort()

    def _check_idle(self) -> None:
        if self._connection.open_streams:
            return  # `no_streams` will come again
        left = self._empty_since + self._limits.idle - self._loop.time()
        if left > 0:
            self._set("idle", left, self._check_idle)
        else:
            self._connection.drain("idle")

    def _too_old(self) -> None:
        self._connection.drain("max_age")
        grace = self._options.max_connection_age_grace / 1000
        if grace:
            self._set("grace", grace, self._connection.close)

    def _set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self._cancel(name)

        def due() -> None:
            del self._timers[name]
            action()

        self._timers[name] = self._loop.call_later(seconds, due)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
