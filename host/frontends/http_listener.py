"""An ASGI application on a port, carried by uvicorn in the host's own event loop."""

from __future__ import annotations

import errno
import logging
import math
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from host.errors import HostError, unavailable

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
"""An ASGI 3 application."""

_log = logging.getLogger("pbhost")

_BACKLOG = 2048


class _Connection(HttpToolsProtocol):
    """Logs where we do: uvicorn's own loggers may be those of a program that a host is part of."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _log
        self.access_log = False


class HttpListener:
    """Serves `app`. All methods belong to the thread of the running event loop.

    uvicorn has no part in signals, logging and the application's life here. `address` is a name,
    an IPv4 address, or `ipv6:[...]`; port 0 is a free one.
    """

    def __init__(self, app: App, address: str, port: int, *, reuse_port: bool = False) -> None:
        self._address = address
        self._port = port
        self._reuse_port = reuse_port
        self._config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
        )
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> int:
        """Listen, and return the port. Raises HostError UNAVAILABLE if that is not possible."""
        listening = self._bind()
        # Not `serve`: that takes the process's signals.
        config = self._config
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        try:
            await server.startup(sockets=[listening])
        except BaseException:
            listening.close()
            raise
        self._server, self._socket = server, listening
        return int(listening.getsockname()[1])

    def _bind(self) -> socket.socket:
        host = self._address.removeprefix("ipv6:").strip("[]")
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            made = socket.socket(family, kind, protocol)
            try:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if self._reuse_port:
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                made.bind(place)
                made.listen(_BACKLOG)  # only here Linux notices who else has bound the port
                made.setblocking(False)
            except BaseException:
                made.close()
                raise
        except OSError as error:
            raise self._refusal(error) from None
        return made

    def _refusal(self, error: OSError) -> HostError:
        where = f"Socket '{self._address}:{self._port}'"
        if error.errno == errno.EADDRINUSE:
            # The trailing space is part of the text (protocol spec 8.3).
            return unavailable(f"{where} already in use ")
        return unavailable(f"{where} cannot be opened: {error.strerror or error}")

    async def stop(self, grace: float) -> None:
        """Accept nothing more, let running requests end within `grace` seconds, and close."""
        server, self._server = self._server, None
        if server is None or self._socket is None:
            return
        self._config.timeout_graceful_shutdown = max(1, math.ceil(grace))
        await server.shutdown(sockets=[self._socket])
        for connection in list(server.server_state.connections):
            connection.transport.abort()
