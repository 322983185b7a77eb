"""The engine `grpcio`: the gRPC service on grpcio's asyncio server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from host.errors import HostError, unavailable
from host.frontends.error_status import GRPC_STATUS, RETRY_METADATA, retry_milliseconds
from host.frontends.grpc.grpc_application import serve_stream
from host.frontends.grpc.methods import (
    GrpcOptions,
    Metadata,
    StreamHandlerFactory,
    StreamMethod,
    UnaryHandler,
    to_host_error,
)
from host.frontends.grpc.service import GrpcService
from host.frontends.receive_memory import (
    SMALL_BYTES,
    OutOfReceiveMemory,
    ReceiveBudget,
    ReservedBytes,
)
from host.frontends.request_headers import Header
from host.frontends.sockets import listening_socket
from host.frontends.tls import TlsContents, TlsFiles

_INT_MAX = (1 << 31) - 1  # the maximum of grpcio's integers: bytes of a message, milliseconds
COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}

_GRPCIO_STATUS = {
    code: next(status for status in grpc.StatusCode if status.value[0] == number)
    for code, number in GRPC_STATUS.items()
}


class GrpcAioFrontend:
    """A gRPC server on grpcio. All methods belong to the thread of the running event loop."""

    def __init__(
        self,
        service: GrpcService,
        address: str = "0.0.0.0",
        port: int = 8001,
        options: GrpcOptions | None = None,
        receive_budget: ReceiveBudget | None = None,
    ) -> None:
        self._service = service
        self._address = address
        self._port = port
        self._options = options or GrpcOptions()
        self._receive_budget = receive_budget or ReceiveBudget()
        self._server: grpc.aio.Server | None = None
        self._new_certificates: deque[Any] = deque(maxlen=1)

    async def start(self) -> int:
        """Starts to listen; returns the port, which is a free one if 0 was requested.

        Raises HostError UNAVAILABLE if the port is taken.
        """
        budget = self._receive_budget
        server = grpc.aio.server(options=_channel_arguments(self._options, budget.limit))
        for name, methods in self._service.services().items():
            handlers = {
                method.name: grpc.stream_stream_rpc_method_handler(
                    _stream_behavior(method.open_stream, budget)
                )
                if isinstance(method, StreamMethod)
                else grpc.unary_unary_rpc_method_handler(_unary_behavior(method.handler, budget))
                for method in methods
            }
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        try:
            port = self._bind(server)
        except (RuntimeError, ValueError):  # without a reason
            await server.stop(None)
            raise self._bind_error() from None
        await server.start()
        self._server = server
        return port

    def _bind(self, server: grpc.aio.Server) -> int:
        host = self._address.removeprefix("ipv6:").strip("[]")
        target = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
        tls = self._options.tls
        if tls is None:
            return server.add_insecure_port(target)
        # grpcio asks for the files of the next connection, on its own threads.
        credentials = grpc.dynamic_ssl_server_credentials(
            _certificates(_read_or_empty(tls)),
            self._take_new_certificates,
            require_client_authentication=tls.mutual,
        )
        return server.add_secure_port(target, credentials)

    def reload_tls(self) -> None:
        """Reads the TLS files again, for new connections. Blocks. Raises HostError INVALID_ARG."""
        tls = self._options.tls
        if tls is not None:
            contents = tls.read()
            tls.create_context(
                contents
            )  # raises for files that grpcio would refuse without a reason
            self._new_certificates.append(_certificates(contents))

    def _take_new_certificates(self) -> Any:
        """Returns the newest files that grpcio has not got; None if it has them."""
        try:
            return self._new_certificates.popleft()
        except IndexError:
            return None

    def _bind_error(self) -> HostError:
        """Finds out why there is no port, by trying what grpcio has tried."""
        try:
            if self._options.tls is not None:
                self._options.tls.create_context()
            listening_socket(self._address, self._port, self._options.reuse_port).close()
        except HostError as error:
            return error
        return unavailable(f"Socket '{self._address}:{self._port}' cannot be opened by gRPC")

    async def stop(self, grace: float) -> None:
        """Refuses new inference requests, waits for open ones, and closes, in `grace` seconds.

        Open requests are cancelled then. To answer health checks in between, `drain` the service
        first.
        """
        if self._server is None:
            return
        deadline = time.monotonic() + grace
        await self._service.drain(grace)
        await self._server.stop(max(deadline - time.monotonic(), 0.0))
        self._server = None


def _read_or_empty(tls: TlsFiles) -> TlsContents:
    """Reads the TLS files; one that cannot be read is empty. Blocks."""
    return TlsContents(
        tls.read_file_or_empty("server-cert"),
        tls.read_file_or_empty("server-key"),
        tls.read_file_or_empty("root-cert") if tls.mutual else None,
    )


def _certificates(contents: TlsContents) -> Any:
    """The contents of TLS files in grpcio's form."""
    return grpc.ssl_server_certificate_configuration(
        [(contents.server_key, contents.server_cert)], root_certificates=contents.root_cert
    )


def check_tls_files(tls: TlsFiles) -> None:
    """Raises HostError INVALID_ARG if the certificate or the key is missing. Blocks.

    Other errors of the files are found only by grpcio, as OpenSSL is stricter.
    """
    for name in ("server-cert", "server-key"):
        if not tls.read_file_or_empty(name):
            tls.read_file(name)


class _AioContext(Metadata):
    """The context of an RPC. Metadata is read only on demand."""

    __slots__ = ("_rpc",)

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc

    def invocation_metadata(self) -> Sequence[Header]:
        return list(self._rpc.invocation_metadata() or ())


def _reserve(budget: ReceiveBudget, message: bytes) -> ReservedBytes | None:
    """Counts the memory of a message that grpcio has received. Raises OutOfReceiveMemory.

    What grpcio holds of incomplete messages is not known.
    """
    return ReservedBytes(budget, len(message)) if len(message) > SMALL_BYTES else None


def _unary_behavior(
    handler: UnaryHandler, budget: ReceiveBudget
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def behavior(data: bytes, rpc: Any) -> bytes:
        reserved = None
        try:
            reserved = _reserve(budget, data)
            return await handler(data, _AioContext(rpc))
        except Exception as error:  # the top of a call: a defect is logged and answered
            _set_error_status(rpc, error)
            return b""
        finally:
            if reserved is not None:
                reserved.release()

    return behavior


def _stream_behavior(
    open_stream: StreamHandlerFactory, budget: ReceiveBudget
) -> Callable[[AsyncIterator[bytes], Any], Awaitable[None]]:
    async def behavior(requests: AsyncIterator[bytes], rpc: Any) -> None:
        try:
            reserve = partial(_reserve, budget)
            set_retry = partial(_set_retry, rpc)
            messages = serve_stream(open_stream, requests, _AioContext(rpc), reserve, set_retry)
            async with aclosing(messages):
                async for message in messages:
                    await rpc.write(message)
        except grpc.aio.InternalError:
            pass  # nothing can be written any more: the client has cancelled the call
        except Exception as error:  # the top of a call, as above
            _set_error_status(rpc, error)

    return behavior


def _set_retry(rpc: Any, milliseconds: int) -> None:
    rpc.set_trailing_metadata(((RETRY_METADATA, str(milliseconds)),))


def _set_error_status(rpc: Any, error: Exception) -> None:
    # Setting the status costs less than rpc.abort(), which raises through grpcio's layers.
    host_error = to_host_error(error)
    if isinstance(error, OutOfReceiveMemory):
        rpc.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
    else:
        rpc.set_code(_GRPCIO_STATUS[host_error.code])
    retry = retry_milliseconds(error)
    if retry is not None:
        _set_retry(rpc, retry)
    rpc.set_details(host_error.message.encode("utf-8", "replace").decode())


def _channel_arguments(options: GrpcOptions, max_message: int) -> list[tuple[str, int]]:
    arguments = [
        ("grpc.max_send_message_length", _INT_MAX),
        ("grpc.max_receive_message_length", max_message),
        ("grpc.server_handshake_timeout_ms", options.handshake_timeout),
        ("grpc.keepalive_time_ms", options.keepalive_time),
        ("grpc.keepalive_timeout_ms", options.keepalive_timeout),
        # grpcio waits a minute for the response to any ping, whatever the argument above says.
        ("grpc.http2.ping_timeout_ms", options.keepalive_timeout),
        ("grpc.keepalive_permit_without_calls", int(options.keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", options.http2_max_pings_without_data),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            options.http2_min_recv_ping_interval_without_data,
        ),
        ("grpc.http2.max_ping_strikes", options.http2_max_ping_strikes),
        # grpcio's default would let a second server share the port unnoticed.
        ("grpc.so_reuseport", int(options.reuse_port)),
    ]
    if options.max_connection_age:
        arguments.append(("grpc.max_connection_age_ms", options.max_connection_age))
    if options.max_connection_age_grace:
        arguments.append(("grpc.max_connection_age_grace_ms", options.max_connection_age_grace))
    level = COMPRESSION_LEVELS[options.compression_level]
    if level:
        # With a level, unlike an algorithm, the core chooses among what the client accepts.
        arguments.append(("grpc.default_compression_level", level))
    return [(name, min(value, _INT_MAX)) for name, value in arguments]
