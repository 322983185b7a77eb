"""The endpoints of a server: gRPC, HTTP and metrics, opened, drained and closed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from host.access.api_keys import ApiKeys
from host.core import Core
from host.errors import HostError, ServiceStartError
from host.frontends.forwarding import HeaderForwarding
from host.frontends.grpc.aio import GrpcAioFrontend, check_tls_files
from host.frontends.grpc.h2.frontend import H2Frontend, create_h2_context
from host.frontends.grpc.h2.limits import ConnectionLimits
from host.frontends.grpc.methods import GrpcOptions
from host.frontends.grpc.service import GrpcService
from host.frontends.http.app import HttpApp
from host.frontends.http.metrics_app import MetricsApp
from host.frontends.http1.connection import Timeouts
from host.frontends.http1.listener import HttpListener
from host.frontends.receive_budget import ReceiveBudget
from host.frontends.restrictions import Restrictions
from host.frontends.sockets import check_address
from host.frontends.tls import TlsFiles, TlsReloader
from host.instances.busy_polling import ConnectionHooks
from host.metrics.family import MetricFamily
from host.options.options import Options
from host.options.validators import CATEGORIES, grpc_restriction, http_restriction, read_origins

_Started = TypeVar("_Started")

_log = logging.getLogger("pbhost")

_GRPC_SERVICE, _HTTP_SERVICE = "GRPCInferenceService", "HTTPService"
_METRICS_SERVICE = "Metrics Service"
_GRPC_PREFIX = "triton-grpc-protocol-"  # prefix of metadata keys for restricted protocols


class Endpoints:
    """The endpoints of a server. Belongs to the event loop; ports are 0 until they are open.

    `families`: the metrics of models.
    """

    def __init__(self, options: Options, families: Callable[[], Iterable[MetricFamily]]) -> None:
        self._options = options
        self._model_families = families
        self.grpc_port = 0
        self.http_port = 0
        self.metrics_port = 0
        self._grpc_service: GrpcService | None = None
        self._grpc: GrpcAioFrontend | H2Frontend | None = None
        self.http_app: HttpApp | None = None
        """The application of the HTTP endpoints, also without a port; None before the start."""
        self._http: HttpListener | None = None
        self._metrics: HttpListener | None = None
        self.api_keys: ApiKeys | None = None
        """The API keys of clients; None if clients need none."""
        self._receive_budget = ReceiveBudget(options.receive_buffer_limit)
        self._http_tls: ssl.SSLContext | None = None
        self._tls_reloader = TlsReloader()
        self._timeouts = Timeouts(
            header_timeout=options.http_header_timeout_secs,
            data_rate_interval=options.http_body_timeout_secs,
            idle_timeout=options.http_idle_timeout_secs,
        )

    async def check_configuration(self) -> None:
        """Checks API keys, certificates and ports before models load. Raises HostError."""
        options = self._options
        key_file = options.api_key_file or options.openai_api_key_file
        if key_file:
            self.api_keys = ApiKeys(key_file, CATEGORIES, options.api_key_max_requests)
        if options.allow_grpc:
            await _start_service("GRPC", _check_grpc_tls(options))
            _check_address(
                "GRPC", "grpc", options.grpc_address, options.grpc_port, options.reuse_grpc_port
            )
        if options.allow_http:
            files = _http_tls(options)
            if files is not None:
                creating = asyncio.to_thread(files.create_context)
                self._http_tls = await _start_service("HTTP", creating)
            _check_address(
                "HTTP", "http", options.http_address, options.http_port, options.reuse_http_port
            )
        if options.allow_metrics:
            _check_address("Metrics", "metrics", options.metrics_host, options.metrics_port)

    async def start(self, core: Core, connection_hooks: ConnectionHooks) -> None:
        """Opens the gRPC and HTTP endpoints of a core.

        `connection_hooks`: called about requests of a connection.

        Raises HostError if a port or a certificate cannot be used.
        """
        if self._options.allow_grpc:
            await self._open_grpc(core, connection_hooks)
        self._create_http_app(core)
        if self._options.allow_http:
            await self._open_http(connection_hooks)

    async def _open_grpc(self, core: Core, connection_hooks: ConnectionHooks) -> None:
        options = self._options
        service = self._grpc_service = GrpcService(
            core,
            Restrictions(grpc_restriction(options.grpc_restricted_protocol), _GRPC_PREFIX),
            HeaderForwarding(options.grpc_header_forward_pattern),
            self.api_keys if options.api_key_file else None,
        )
        settings = _grpc_options(options)
        address, port = options.grpc_address, options.grpc_port
        if options.grpc_engine == "h2":
            limits = ConnectionLimits(
                handshake_timeout=options.grpc_handshake_timeout_secs,
                data_rate_interval=options.grpc_body_timeout_secs,
            )
            self._grpc = H2Frontend(
                service, address, port, settings, limits, connection_hooks, self._receive_budget
            )
        else:
            self._grpc = GrpcAioFrontend(service, address, port, settings, self._receive_budget)
        self.grpc_port = await _start_service("GRPC", self._grpc.start())
        if settings.tls is not None:
            await self._tls_reloader.add(settings.tls, self._grpc.reload_tls)

    def _create_http_app(self, core: Core) -> None:
        options = self._options
        self.http_app = HttpApp(
            core,
            options.http_max_input_size,
            Restrictions(http_restriction(options.http_restricted_api)),
            HeaderForwarding(options.http_header_forward_pattern),
            self._model_families,
            options.http_api_page,
            options.http_dashboard,
            self._receive_budget,
            options.allow_openai,
            self.api_keys if options.api_key_file else None,
            self.api_keys,
            read_origins(options.openai_cors_origins),
            recording=options.allow_recording,
        )

    async def _open_http(self, connection_hooks: ConnectionHooks) -> None:
        options, app = self._options, self.http_app
        assert app is not None
        self._http = HttpListener(
            app,
            options.http_address,
            options.http_port,
            reuse_port=options.reuse_http_port,
            tls=self._http_tls,
            timeouts=self._timeouts,
            fast_path=app.fast_path,
            connection_hooks=connection_hooks,
        )
        self.http_port = await _start_service("HTTP", self._http.start())
        files, context = _http_tls(options), self._http_tls
        if files is not None and context is not None:
            await self._tls_reloader.add(files, partial(files.reload, context))

    async def start_metrics(
        self, families: Callable[[], Awaitable[Iterable[MetricFamily]]]
    ) -> None:
        """Opens the metrics endpoint. Raises HostError."""
        address = self._options.metrics_host
        self._metrics = HttpListener(
            MetricsApp(families), address, self._options.metrics_port, timeouts=self._timeouts
        )
        self.metrics_port = await _start_service("Metrics", self._metrics.start())

    def log_listening(self) -> None:
        """Logs the open ports, before the models are loaded."""
        ports = [f"{service} at {address}" for service, address in self._addresses()]
        if ports:
            _log.info(
                "listening: %s; requests are refused until the models are loaded", ", ".join(ports)
            )

    def log_started(self) -> None:
        """Logs that the services can be used, in the words of Triton."""
        for service, address in self._addresses():
            _log.info("Started %s at %s", service, address)
            if service == _HTTP_SERVICE:
                self._log_pages()

    def _log_pages(self) -> None:
        """Logs the addresses of the web pages."""
        options = self._options
        scheme = "http" if self._http_tls is None else "https"
        host = options.http_address.removeprefix("ipv6:")
        name = "localhost" if host in ("0.0.0.0", "[::]") else host
        address = f"{scheme}://{name}:{self.http_port}"
        if options.http_api_page:
            _log.info("Models can be tried at %s/docs", address)
        if options.http_dashboard:
            _log.info("What they do can be watched at %s/dashboard", address)

    def _addresses(self) -> Iterator[tuple[str, str]]:
        """Each service that is open, and its address with its port."""
        options = self._options
        if self._grpc is not None:
            yield _GRPC_SERVICE, f"{options.grpc_address}:{self.grpc_port}"
        if self._http is not None:
            yield _HTTP_SERVICE, f"{options.http_address}:{self.http_port}"
        if self._metrics is not None:
            yield _METRICS_SERVICE, f"{options.metrics_host}:{self.metrics_port}"

    async def reload_tls(self) -> None:
        """Reads the TLS files again, for new connections; logs what came of it."""
        await self._tls_reloader.reload()

    async def drain(self, deadline: float) -> bool:
        """Refuses new requests, and waits for open ones until `deadline` (loop time).

        Returns whether all were answered. Health requests are still answered.
        """
        services: list[tuple[str, GrpcService | HttpApp]] = []
        if self.http_app is not None:
            services.append(("HTTP service connections", self.http_app))
        if self._grpc_service is not None:
            what = "gRPC service connections and inference handlers"
            services.append((what, self._grpc_service))

        def report(left: float) -> None:
            for what, service in services:
                _log.info("Timeout %d: Found %d %s", left, service.open_requests, what)

        left = max(0.0, deadline - asyncio.get_running_loop().time())
        draining = asyncio.gather(*(service.drain(left) for _, service in services))
        await wait_with_reports(draining, deadline, report)
        return all(await draining)

    async def stop(self, deadline: float) -> None:
        """Closes all endpoints but metrics by `deadline`, and cuts off what is still open."""
        await self._tls_reloader.close()
        grpc, self._grpc, self._grpc_service = self._grpc, None, None
        http, self._http, self.http_app = self._http, None, None
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.gather(
            *(frontend.stop(left) for frontend in (http, grpc) if frontend is not None)
        )

    async def stop_metrics(self, grace: float) -> None:
        """Closes the metrics endpoint, as the last one."""
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            await metrics.stop(grace)


async def wait_with_reports(
    work: asyncio.Future[Any],
    deadline: float,
    report: Callable[[float], None],
) -> bool:
    """Waits until `deadline` (loop time), and calls `report` every second with the seconds left.

    Returns whether the work has ended; otherwise it goes on.
    """
    loop = asyncio.get_running_loop()
    while True:
        left = deadline - loop.time()
        done, _ = await asyncio.wait([work], timeout=max(0.0, min(1.0, left)))
        if done:
            return True
        if left <= 0.0:
            return False
        report(left)


async def _start_service(service: str, starting: Awaitable[_Started]) -> _Started:
    try:
        return await starting
    except HostError as error:
        raise _logged_failure(service, error) from error


def _logged_failure(service: str, error: HostError, hint: str = "") -> ServiceStartError:
    """Logs why a service cannot start, with a hint; returns the error to raise."""
    summary = f"failed to start {service} service"
    _log.error("%s: %s - %s%s", summary, error.code.value, error.message, hint)
    return ServiceStartError(error, summary)


def _check_address(
    service: str, flag_prefix: str, address: str, port: int, reuse_port: bool = False
) -> None:
    try:
        check_address(address, port, reuse_port)
    except HostError as error:
        hint = (
            f"\n--{flag_prefix}-address={address} --{flag_prefix}-port={port}: this must be an"
            " address of this machine, and a port that no other process listens on; port 0 selects"
            " a free port"
        )
        raise _logged_failure(service, error, hint) from error


async def _check_grpc_tls(options: Options) -> None:
    files = _grpc_tls(options)
    if files is not None:
        check = create_h2_context if options.grpc_engine == "h2" else check_tls_files
        await asyncio.to_thread(check, files)


def _grpc_options(options: Options) -> GrpcOptions:
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
        tls=_grpc_tls(options),
    )


def _http_tls(options: Options) -> TlsFiles | None:
    if not (options.http_use_ssl or options.http_use_ssl_mutual):
        return None
    return TlsFiles(
        "http",
        options.http_server_cert,
        options.http_server_key,
        options.http_root_cert,
        options.http_use_ssl_mutual,
    )


def _grpc_tls(options: Options) -> TlsFiles | None:
    if not (options.grpc_use_ssl or options.grpc_use_ssl_mutual):
        return None
    return TlsFiles(
        "grpc",
        options.grpc_server_cert,
        options.grpc_server_key,
        options.grpc_root_cert,
        options.grpc_use_ssl_mutual,
    )
