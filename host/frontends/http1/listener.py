"""An ASGI application on a port, in the host's own event loop."""

from __future__ import annotations

import asyncio
import ssl

from host.frontends.http1.connection import Connection, Patience
from host.frontends.http1.cycle import App
from host.frontends.http1.header_cache import Heads, Starter
from host.frontends.sockets import BACKLOG, listening_socket
from host.instances.busy_polling import Sources, nobody

_LAST_SECONDS = 1.0  # for the last answers to leave


class HttpListener:
    """Serves `app`. All methods belong to the thread of the running event loop.

    `address` is a name, an IPv4 address, or `ipv6:[...]`; port 0 is a free one. With `tls`, it
    speaks HTTPS only. `starter` says which requests `app` can answer without a task.
    """

    def __init__(
        self,
        app: App,
        address: str,
        port: int,
        *,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        patience: Patience | None = None,
        starter: Starter | None = None,
        sources: Sources = nobody,
    ) -> None:
        self._app = app
        self._address = address
        self._port = port
        self._reuse_port = reuse_port
        self._tls = tls
        self._patience = patience or Patience()
        self._heads = None if starter is None else Heads(starter)
        self._sources = sources
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen, and return the port. Raises HostError UNAVAILABLE if that is not possible."""
        listening = listening_socket(self._address, self._port, self._reuse_port)
        port = int(listening.getsockname()[1])
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connection,
                sock=listening,
                ssl=self._tls,
                ssl_handshake_timeout=self._patience.headers if self._tls else None,
                backlog=BACKLOG,
            )
        except BaseException:  # also if cancelled: nobody else would close it
            listening.close()
            raise
        return port

    def _connection(self) -> Connection:
        return Connection(
            self._app,
            self._patience,
            self._connections,
            self._tasks,
            self._sources(),
            self._heads,
        )

    async def stop(self, grace: float) -> None:
        """Accept nothing more, let running requests end within `grace` seconds, and close."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in list(self._connections):
            connection.shutdown()
        busy = [*self._tasks, *(c.closed for c in self._connections if c.answers_promptly)]
        if busy:
            await asyncio.wait(busy, timeout=max(0.0, grace))
        for task in self._tasks:  # what still runs; it says so to its client
            task.cancel()
        for connection in list(self._connections):
            connection.give_up()
        last = [connection.closed for connection in self._connections]
        if last:  # what is written is still to be sent
            await asyncio.wait(last, timeout=_LAST_SECONDS)
        for connection in list(self._connections):
            connection.transport.abort()
        await server.wait_closed()
