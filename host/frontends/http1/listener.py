"""Listens on a port for one ASGI application, in the event loop of the host."""

from __future__ import annotations

import asyncio
import socket
import ssl

from host.frontends.http1.asgi import App
from host.frontends.http1.http1_connection import Http1Connection, Timeouts
from host.frontends.http1.parser import FastPath, HeadReader
from host.frontends.sockets import accept_connections, listening_socket
from host.instances.busy_polling import ConnectionHooks, no_connection_hook

_CLOSE_TIMEOUT = 1.0  # seconds, to send the last responses


class HttpListener:
    """Serves `app`. All methods belong to the thread of the running event loop.

    `address` is a name, an IPv4 address, or `ipv6:[...]`; port 0 is a free one. With `tls`, it
    speaks HTTPS only. `fast_path` says which requests `app` can answer without a task.
    `listening`: a socket that listens already, instead of the address.
    """

    def __init__(
        self,
        app: App,
        address: str,
        port: int,
        *,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        timeouts: Timeouts | None = None,
        fast_path: FastPath | None = None,
        connection_hooks: ConnectionHooks = no_connection_hook,
        listening: socket.socket | None = None,
    ) -> None:
        self._app = app
        self._listening = listening
        self._address = address
        self._port = port
        self._reuse_port = reuse_port
        self._tls = tls
        self._timeouts = timeouts or Timeouts()
        self._head_reader = None if fast_path is None else HeadReader(fast_path)
        self._connection_hooks = connection_hooks
        self._server: asyncio.Server | None = None
        self._connections: set[Http1Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listens, and returns the port. Raises HostError UNAVAILABLE if that is not possible."""
        listening = self._listening or listening_socket(self._address, self._port, self._reuse_port)
        port = int(listening.getsockname()[1])
        self._server = await accept_connections(
            listening, self._connection, self._tls, self._timeouts.header_timeout
        )
        return port

    def _connection(self) -> Http1Connection:
        return Http1Connection(
            self._app,
            self._timeouts,
            self._connections,
            self._tasks,
            self._connection_hooks(),
            self._head_reader,
        )

    async def stop(self, grace: float) -> None:
        """Stops accepting, waits up to `grace` seconds for running requests, and closes."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in list(self._connections):
            connection.shutdown()
        busy = [*self._tasks, *(c.closed for c in self._connections if c.on_fast_path)]
        if busy:
            await asyncio.wait(busy, timeout=max(0.0, grace))
        for task in self._tasks:  # their clients get an error response
            task.cancel()
        for connection in list(self._connections):
            connection.cancel_fast_path()
        last = [connection.closed for connection in self._connections]
        if last:  # wait until the written data is sent
            await asyncio.wait(last, timeout=_CLOSE_TIMEOUT)
        for connection in list(self._connections):
            connection.transport.abort()
        await server.wait_closed()
