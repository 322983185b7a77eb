"""The gRPC and HTTP endpoints of one process, opened, drained and closed."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable
from typing import TypeVar

from host.errors import HostError, ServiceStartError
from host.frontends.grpc.grpcio_engine import GrpcAioFrontend, check_tls_files
from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.h2.frontend import H2Frontend, create_h2_tls
from host.frontends.grpc.methods import GrpcOptions, Services
from host.frontends.grpc.service import GrpcService
from host.frontends.http.inference_app import InferenceApp
from host.frontends.http1.http1_connection import Timeouts
from host.frontends.http1.listener import HttpListener
from host.frontends.inference_core import InferenceCore, InferenceKeys
from host.frontends.receive_memory import ReceiveBudget
from host.frontends.request_headers import HeaderForwarding, Restrictions
from host.frontends.tls import ServerTls, TlsFiles, TlsReloader
from host.instances.busy_polling import ConnectionHooks
from host.options.options import Options
from host.options.validators import grpc_restriction

_Started = TypeVar("_Started")

_log = logging.getLogger("pbhost")

_GRPC_PREFIX = "triton-grpc-protocol-"  # prefix of metadata keys for restricted protocols


def make_grpc_service(
    options: Options,
    core: InferenceCore,
    others: Services,
    api_keys: InferenceKeys | None,
) -> GrpcService:
    """The gRPC service over a core; `others` are the methods that are not for inference.

    `api_keys`: the keys that clients need.
    """
    return GrpcService(
        core,
        others,
        Restrictions(grpc_restriction(options.grpc_restricted_protocol), _GRPC_PREFIX),
        HeaderForwarding(options.grpc_header_forward_pattern),
        api_keys,
        options.grpc_reflection,
    )


class ClientEndpoints:
    """The gRPC and HTTP endpoints. Belongs to the event loop."""

    def __init__(
        self,
        options: Options,
        connection_hooks: ConnectionHooks,
        receive_budget: ReceiveBudget | None = None,
        watches_tls: bool = True,
    ) -> None:
        """`connection_hooks`: called about requests of a connection.

        `watches_tls`: reads the TLS files again when they change; otherwise only when told to.
        """
        self._options = options
        self._connection_hooks = connection_hooks
        self.receive_budget = receive_budget or ReceiveBudget(options.receive_buffer_limit)
        self._grpc_service: GrpcService | None = None
        self._grpc: GrpcAioFrontend | H2Frontend | None = None
        self._http_app: InferenceApp | None = None
        self._http: HttpListener | None = None
        self._tls_reloader = TlsReloader(watches_tls)
        self._timeouts = make_timeouts(options)

    async def open_grpc(self, service: GrpcService, listening: socket.socket | None = None) -> int:
        """Opens the gRPC endpoint; returns its port. Raises HostError, which is logged.

        `listening`: a socket that listens already, for the engine h2.
        """
        options = self._options
        self._grpc_service = service
        settings = grpc_options(options)
        address, port = options.grpc_address, options.grpc_port
        if options.grpc_engine == "h2":
            limits = ConnectionLimits(
                handshake_timeout=options.grpc_handshake_timeout_secs,
                data_rate_interval=options.grpc_body_timeout_secs,
            )
            self._grpc = H2Frontend(
                service,
                address,
                port,
                settings,
                limits,
                self._connection_hooks,
                self.receive_budget,
                listening,
            )
        else:
            self._grpc = GrpcAioFrontend(service, address, port, settings, self.receive_budget)
        opened = await start_service("GRPC", self._grpc.start())
        if settings.tls is not None:
            await self._tls_reloader.add(settings.tls, self._grpc.reload_tls)
        return opened

    async def open_http(
        self,
        app: InferenceApp,
        tls: ServerTls | None,
        listening: socket.socket | None = None,
    ) -> int:
        """Opens the HTTP endpoint; returns its port. Raises HostError, which is logged."""
        options = self._options
        self._http_app = app
        self._http = HttpListener(
            app,
            options.http_address,
            options.http_port,
            reuse_port=options.reuse_http_port,
            tls=None if tls is None else tls.context,
            timeouts=self._timeouts,
            fast_path=app.fast_path,
            connection_hooks=self._connection_hooks,
            listening=listening,
        )
        opened = await start_service("HTTP", self._http.start())
        if tls is not None:
            await self._tls_reloader.add(tls.files, tls.reload)
        return opened

    @property
    def open_http_requests(self) -> int:
        """The number of open inference requests of the HTTP endpoint."""
        return 0 if self._http_app is None else self._http_app.open_requests

    @property
    def open_grpc_requests(self) -> int:
        """The number of open inference requests of the gRPC endpoint."""
        return 0 if self._grpc_service is None else self._grpc_service.open_requests

    async def reload_tls(self) -> None:
        """Reads the TLS files again, for new connections; logs the result."""
        await self._tls_reloader.reload()

    async def drain(self, seconds: float) -> bool:
        """Refuses new inference requests, and waits at most `seconds` for open ones.

        Returns whether all were answered. Other requests are still answered.
        """
        draining = [
            service.drain(seconds)
            for service in (self._http_app, self._grpc_service)
            if service is not None
        ]
        return all(await asyncio.gather(*draining))

    async def stop(self, seconds: float) -> None:
        """Closes the endpoints within `seconds`, and cuts off what is still open then."""
        await self._tls_reloader.close()
        grpc, self._grpc, self._grpc_service = self._grpc, None, None
        http, self._http, self._http_app = self._http, None, None
        await asyncio.gather(
            *(frontend.stop(seconds) for frontend in (http, grpc) if frontend is not None)
        )


def make_timeouts(options: Options) -> Timeouts:
    """The timeouts of HTTP connections."""
    return Timeouts(
        header_timeout=options.http_header_timeout_secs,
        data_rate_interval=options.http_body_timeout_secs,
        idle_timeout=options.http_idle_timeout_secs,
    )


async def start_service(service: str, starting: Awaitable[_Started]) -> _Started:
    """Awaits the start of a service; logs and raises ServiceStartError if that fails."""
    try:
        return await starting
    except HostError as error:
        raise logged_failure(service, error) from error


def logged_failure(service: str, error: HostError, hint: str = "") -> ServiceStartError:
    """Logs why a service cannot start, with a hint; returns the error to raise."""
    summary = f"failed to start {service} service"
    _log.error("%s: %s - %s%s", summary, error.code.value, error.message, hint)
    return ServiceStartError(error, summary)


async def check_grpc_tls(options: Options) -> None:
    """Checks the TLS files of the gRPC endpoint. Raises HostError, which is logged."""
    files = grpc_tls(options)
    if files is not None:
        check = create_h2_tls if options.grpc_engine == "h2" else check_tls_files
        await start_service("GRPC", asyncio.to_thread(check, files))


async def create_http_tls(options: Options) -> ServerTls | None:
    """TLS of the HTTP endpoint, or None without it. Raises HostError, which is logged."""
    files = http_tls(options)
    if files is None:
        return None
    return await start_service("HTTP", asyncio.to_thread(ServerTls, files))


def grpc_options(options: Options) -> GrpcOptions:
    """The options of the gRPC engine."""
    return GrpcOptions(
        keepalive_time=options.grpc_keepalive_time,
        keepalive_timeout=options.grpc_keepalive_timeout,
        keepalive_permit_without_calls=options.grpc_keepalive_permit_without_calls,
        http2_max_pings_without_data=options.grpc_http2_max_pings_without_data,
        http2_min_recv_ping_interval_without_data=(
            options.grpc_http2_min_recv_ping_interval_without_data
        ),
        http2_max_ping_strikes=options.grpc_http2_max_ping_strikes,
        max_connection_age=options.grpc_max_connection_age,
        max_connection_age_grace=options.grpc_max_connection_age_grace,
        reuse_port=options.reuse_grpc_port,
        compression_level=options.grpc_infer_response_compression_level,
        handshake_timeout=round(1000 * options.grpc_handshake_timeout_secs),
        tls=grpc_tls(options),
    )


def http_tls(options: Options) -> TlsFiles | None:
    """The TLS files of the HTTP endpoint; None without TLS."""
    if not (options.http_use_ssl or options.http_use_ssl_mutual):
        return None
    return TlsFiles(
        "http",
        options.http_server_cert,
        options.http_server_key,
        options.http_root_cert,
        options.http_use_ssl_mutual,
    )


def grpc_tls(options: Options) -> TlsFiles | None:
    """The TLS files of the gRPC endpoint; None without TLS."""
    if not (options.grpc_use_ssl or options.grpc_use_ssl_mutual):
        return None
    return TlsFiles(
        "grpc",
        options.grpc_server_cert,
        options.grpc_server_key,
        options.grpc_root_cert,
        options.grpc_use_ssl_mutual,
    )
