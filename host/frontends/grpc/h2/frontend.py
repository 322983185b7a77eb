"""The gRPC server on pbhost's own HTTP/2: the engine `h2`."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Protocol

from host.frontends.grpc.h2 import grpc_messages
from host.frontends.grpc.h2.calls import GrpcCall, RefusedCall, Rpc, parse_rpc
from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.h2.grpc_messages import RpcError, StatusCode
from host.frontends.grpc.h2.h2_connection import H2Connection
from host.frontends.grpc.h2.h2_stream import Route
from host.frontends.grpc.h2.headers import Fields
from host.frontends.grpc.h2.hpack import Field, UsualRequest
from host.frontends.grpc.h2.stream_call import StreamCall
from host.frontends.grpc.h2.unary_call import UnaryCall
from host.frontends.grpc.methods import GrpcOptions, Method, Services, StreamMethod
from host.frontends.receive_memory import ReceiveBudget
from host.frontends.sockets import accept_connections, listening_socket
from host.frontends.tls import ServerTls, TlsFiles
from host.instances.busy_polling import ConnectionHooks, no_connection_hook

_GRPC = b"application/grpc"
_MAX_USUAL = 64


class Router:
    """Finds the route of a request among the methods of all services."""

    def __init__(self, services: Services, options: GrpcOptions, limits: ConnectionLimits) -> None:
        self._methods: dict[bytes, Method] = {
            f"/{service}/{method.name}".encode(): method
            for service, methods in services.items()
            for method in methods
        }
        self._compression_level = options.compression_level
        self._max_header_list = limits.max_header_list
        # The RPCs of usual requests that were not refused, by their interpreted fields.
        self._usual: dict[tuple[Field, ...], tuple[type[GrpcCall], Method, str, str]] = {}

    def route(self, fields: Fields, size: int, usual: UsualRequest | None = None) -> Route:
        """Returns the route of a request; one that is refused has a route that answers an error.

        `size` is the size of the header list in bytes (RFC 9113 section 6.5.2). `usual` is given
        for a request without content-length and binary metadata.
        """
        if usual is not None and size <= self._max_header_list:
            interpreted, timeout = usual
            known_rpc = self._usual.get(interpreted)
            if known_rpc is not None:
                call, method, encoding, response_encoding = known_rpc
                return Route(
                    partial(call, Rpc(method, timeout, encoding, response_encoding, fields), None),
                    call is StreamCall or timeout is not None,
                )
        known = dict(fields)
        if known[b":method"] != b"POST":
            return _refused(grpc_messages.http_error_headers(405))
        if not _is_grpc(known.get(b"content-type", b"")):
            return _refused(grpc_messages.http_error_headers(415))
        try:
            if size > self._max_header_list:
                text = f"received metadata of {size} bytes, the limit is {self._max_header_list}"
                raise RpcError(StatusCode.RESOURCE_EXHAUSTED, text)
            rpc = parse_rpc(fields, self._methods, self._compression_level)
        except RpcError as fault:
            end = grpc_messages.trailers(fault.code, fault.message)
            return _refused(grpc_messages.RESPONSE_HEADERS + grpc_messages.ACCEPT_ENCODING + end)
        length = known.get(b"content-length")
        call = StreamCall if isinstance(rpc.method, StreamMethod) else UnaryCall
        if usual is not None:
            if len(self._usual) >= _MAX_USUAL:
                self._usual.clear()
            self._usual[usual[0]] = call, rpc.method, rpc.encoding, rpc.response_encoding
        return Route(
            partial(call, rpc, int(length) if length else None),
            acts_at_once=call is StreamCall or rpc.timeout is not None,
        )


def _refused(block: bytes) -> Route:
    return Route(partial(RefusedCall, block), acts_at_once=True)


def _is_grpc(content_type: bytes) -> bool:
    """Whether a content type is `application/grpc`, with any suffix or parameters."""
    return content_type == _GRPC or content_type.startswith((_GRPC + b"+", _GRPC + b";"))


_CLOSE_TIMEOUT = 1.0  # seconds to send GOAWAY and the last responses
_TURNS_TO_OPEN = 3  # of the event loop, at most, until an accepted connection without TLS is open


class Service(Protocol):
    """The service that an engine serves."""

    def services(self) -> Services:
        """Returns the methods of each service."""

    async def drain(self, timeout: float) -> bool:
        """Refuses new requests and waits for open ones; returns whether all of them ended."""


class H2Frontend:
    """A gRPC server. Its methods are called in the thread of the event loop only."""

    def __init__(
        self,
        service: Service,
        address: str = "0.0.0.0",
        port: int = 8001,
        options: GrpcOptions | None = None,
        limits: ConnectionLimits | None = None,
        connection_hooks: ConnectionHooks = no_connection_hook,
        receive_budget: ReceiveBudget | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        """`listening`: a socket that listens already, instead of the address."""
        self._listening = listening
        self._service = service
        self._connection_hooks = connection_hooks
        self._address = address
        self._port = port
        self._options = options or GrpcOptions()
        self._limits = limits or ConnectionLimits()
        self._receive_budget = receive_budget or ReceiveBudget()
        self._tls: ServerTls | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[H2Connection] = set()
        self._all_closed = asyncio.Event()
        self._stopped = False

    async def start(self) -> int:
        """Starts to listen and returns the port; port 0 selects a free one.

        Raises HostError: UNAVAILABLE if the port is in use, INVALID_ARG if a TLS file is invalid.
        """
        router = Router(self._service.services(), self._options, self._limits)

        def connect() -> H2Connection:
            return H2Connection(
                router.route,
                self._options,
                self._limits,
                self._connection_opened,
                self._connection_closed,
                self._connection_hooks(),
                self._receive_budget,
            )

        context = None
        if self._options.tls is not None:
            self._tls = await asyncio.to_thread(create_h2_tls, self._options.tls)
            context = self._tls.context
        listening = self._listening or listening_socket(
            self._address, self._port, self._options.reuse_port
        )
        self._server = await accept_connections(
            listening, connect, context, self._limits.handshake_timeout
        )
        self._all_closed.set()
        return int(listening.getsockname()[1])

    def reload_tls(self) -> None:
        """Reads the TLS files again, for new connections. Blocks. Raises HostError INVALID_ARG."""
        if self._tls is not None:
            self._tls.reload()

    async def stop(self, grace: float) -> None:
        """Refuses new inference requests, waits at most `grace` seconds for open ones, and closes.

        Requests that are open after that end with UNAVAILABLE. A caller that wants health checks
        answered until then drains the service first.
        """
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        server, self._server = self._server, None
        await self._service.drain(grace)
        self._stopped = True
        server.close()
        for _ in range(_TURNS_TO_OPEN):
            await asyncio.sleep(0)
        for connection in list(self._connections):
            connection.drain()
        await self._wait_until_closed(deadline - loop.time())
        for connection in list(self._connections):
            connection.close()
        await self._wait_until_closed(_CLOSE_TIMEOUT)
        for connection in list(self._connections):
            connection.abort()
        await self._all_closed.wait()

    async def _wait_until_closed(self, seconds: float) -> None:
        if seconds > 0:
            try:
                await asyncio.wait_for(self._all_closed.wait(), seconds)
            except asyncio.TimeoutError:
                pass  # the caller closes what is left

    def _connection_opened(self, connection: H2Connection) -> None:
        self._connections.add(connection)
        self._all_closed.clear()
        if self._stopped:  # accepted while the server stopped
            connection.close()

    def _connection_closed(self, connection: H2Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()


def create_h2_tls(files: TlsFiles) -> ServerTls:
    """Returns TLS for HTTP/2. Blocks. Raises HostError INVALID_ARG."""
    for name in ("server-cert", "server-key"):
        files.read_file_or_empty(name)  # logs an unreadable file before the context refuses it
    return ServerTls(files, ["h2"])
