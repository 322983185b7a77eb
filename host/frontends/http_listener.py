"""An ASGI application on a port, carried by uvicorn in the host's own event loop."""

from __future__ import annotations

import asyncio
import functools
import math
import socket
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from host.frontends.http_connection import Connection, Patience
from host.frontends.sockets import BACKLOG, listening_socket

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
"""An ASGI 3 application."""

_LAST_SECONDS = 1.0  # for the last answers to leave


class HttpListener:
    """Serves `app`. All methods belong to the thread of the running event loop.

    uvicorn has no part in signals, logging and the application's life here. `address` is a name,
    an IPv4 address, or `ipv6:[...]`; port 0 is a free one. With `tls`, it speaks HTTPS only.
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
    ) -> None:
        self._address = address
        self._port = port
        self._reuse_port = reuse_port
        self._tls = tls
        self._config = uvicorn.Config(
            app,
            http=functools.partial(Connection, patience=patience or Patience()),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
        )
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> int:
        """Listen, and return the port. Raises HostError UNAVAILABLE if that is not possible."""
        listening = listening_socket(self._address, self._port, self._reuse_port)
        # Not `serve`: that takes the process's signals.
        config = self._config
        config.load()
        config.ssl = self._tls
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        try:
            await server.startup(sockets=[listening])
        except BaseException:
            listening.close()
            raise
        self._server, self._socket = server, listening
        return int(listening.getsockname()[1])

    async def stop(self, grace: float) -> None:
        """Accept nothing more, let running requests end within `grace` seconds, and close."""
        server, self._server = self._server, None
        if server is None or self._socket is None:
            return
        self._config.timeout_graceful_shutdown = max(1, math.ceil(grace))
        await server.shutdown(sockets=[self._socket])
        if server.server_state.tasks:  # cancelled when the time was over, and about to say so
            await asyncio.wait(list(server.server_state.tasks), timeout=_LAST_SECONDS)
        for connection in list(server.server_state.connections):
            connection.transport.abort()
