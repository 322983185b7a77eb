"""Tells the service manager, systemd, of the state of the server (sd_notify(3))."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import MutableMapping

_log = logging.getLogger("pbhost")

_MICROSECONDS = 1_000_000
_RETRY_SECONDS = 0.1


class ServiceManager:
    """Sends notifications to the socket that the service manager has named, if it has named one.

    It never waits. Belongs to the event loop's thread.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Removes the variables of the protocol from the environment: they are not for models."""
        address = environment.pop("NOTIFY_SOCKET", "")
        interval = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", str(os.getpid()))
        self._socket: socket.socket | None = None
        self._serving = False
        self._error: OSError | None = None  # is logged as soon as there is a log
        self._reported = False
        if address:
            try:
                self._socket = _connect(address)
            except OSError as error:
                self._error = error
        self._watchdog_seconds = 0.0
        if interval.isdigit() and watched == str(os.getpid()):
            self._watchdog_seconds = int(interval) / _MICROSECONDS / 2
        self._timer: asyncio.TimerHandle | None = None
        self._pending: deque[bytes] = deque()
        self._retry: asyncio.TimerHandle | None = None

    def starting(self) -> None:
        """The server opens its ports and loads its models."""
        self._send("STATUS=Loading models")

    def started(self) -> None:
        """The server is ready."""
        self._serving = True
        self._send("READY=1", "STATUS=Serving")
        if self._error is not None and not self._reported:
            self._reported = True
            _log.warning("the service manager cannot be notified: %s", self._error)

    def failed(self, reason: str) -> None:
        """The start has failed."""
        self._send(f"STATUS=Failed: {' '.join(reason.split())}")

    def reloading(self) -> None:
        """The server reads files again, until `reloaded`."""
        if not self._serving:
            return
        monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={monotonic}", "STATUS=Reading files again")

    def reloaded(self) -> None:
        """The server has read files again."""
        if self._serving:
            self.started()

    def stopping(self) -> None:
        """The server has begun to exit."""
        self._serving = False
        self._send("STOPPING=1", "STATUS=Finishing requests")

    def start_watchdog(self) -> None:
        """Sends signs of life from the running event loop, if the service manager wants them."""
        if self._socket is not None and self._watchdog_seconds:
            self._send_sign_of_life()

    def _send_sign_of_life(self) -> None:
        if not self._pending:  # otherwise, the service manager does not read
            self._send("WATCHDOG=1")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._watchdog_seconds, self._send_sign_of_life)

    def _send(self, *fields: str) -> None:
        if self._socket is not None:
            self._pending.append("\n".join(fields).encode())
            self._send_pending()

    def _send_pending(self) -> None:
        """Sends what waits; tries again later if the service manager does not read."""
        if self._retry is not None:
            self._retry.cancel()
        try:
            while self._socket is not None and self._pending:
                self._socket.send(self._pending[0])
                self._pending.popleft()
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_RETRY_SECONDS, self._send_pending)
        except OSError as error:
            self._pending.clear()
            self._error = error

    def close(self) -> None:
        """Stops the signs of life and closes the socket."""
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connect(address: str) -> socket.socket:
    """Opens the socket of an address: a path, or `@` and an abstract name. Raises OSError."""
    notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notifications.setblocking(False)
    try:
        notifications.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    except OSError:
        notifications.close()
        raise
    return notifications
