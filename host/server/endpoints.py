"""The endpoints of a server: gRPC, HTTP and metrics, opened, drained and closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from host.access.api_keys import DEFAULT_CATEGORIES, ApiKeys
from host.core import Core
from host.errors import HostError
from host.frontend_processes.processes import FrontendProcesses
from host.frontends.client_endpoints import (
    ClientEndpoints,
    check_grpc_tls,
    create_http_tls,
    logged_failure,
    make_grpc_service,
    make_timeouts,
    start_service,
)
from host.frontends.grpc.grpc_admin import admin_services
from host.frontends.grpc.service import GrpcService
from host.frontends.http.app import HttpApp
from host.frontends.http.metrics_endpoint import MetricsApp
from host.frontends.http1.listener import HttpListener
from host.frontends.receive_memory import ReceiveBudget, ReserveBlock
from host.frontends.sockets import check_address
from host.frontends.tls import ServerTls
from host.instances.busy_polling import ConnectionHooks
from host.metrics.families import MetricFamily
from host.options.options import Options
from host.options.validators import CATEGORIES

_log = logging.getLogger("pbhost")

_GRPC_SERVICE, _HTTP_SERVICE = "GRPCInferenceService", "HTTPService"
_METRICS_SERVICE = "Metrics Service"


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
        self._clients: ClientEndpoints | FrontendProcesses | None = None
        self.http_app: HttpApp | None = None
        """The application of the HTTP endpoints, also without a port; None before the start."""
        self.grpc_service: GrpcService | None = None
        """The gRPC service, also without a port; None before the start."""
        self._metrics: HttpListener | None = None
        self.api_keys: ApiKeys | None = None
        """The API keys of clients; None if clients need none."""
        self._http_tls: ServerTls | None = None

    async def check_configuration(self) -> None:
        """Checks API keys, certificates and ports before models load. Raises HostError."""
        options = self._options
        key_file = options.api_key_file or options.openai_api_key_file
        if key_file:
            # A key for the OpenAI routes allows all of them, also to load models.
            default = DEFAULT_CATEGORIES if options.api_key_file else frozenset(CATEGORIES)
            self.api_keys = ApiKeys(key_file, CATEGORIES, default, options.api_key_max_requests)
        if options.allow_grpc:
            await check_grpc_tls(options)
            _check_address(
                "GRPC", "grpc", options.grpc_address, options.grpc_port, options.reuse_grpc_port
            )
        if options.allow_http:
            self._http_tls = await create_http_tls(options)
            _check_address(
                "HTTP", "http", options.http_address, options.http_port, options.reuse_http_port
            )
        if options.allow_metrics:
            _check_address("Metrics", "metrics", options.metrics_host, options.metrics_port)

    async def start(
        self,
        core: Core,
        connection_hooks: ConnectionHooks,
        reserve_block: ReserveBlock,
        processes: FrontendProcesses | None = None,
    ) -> None:
        """Opens the gRPC and HTTP endpoints of a core.

        `connection_hooks`: called about requests of a connection. `reserve_block`: for tensors that
        are received. `processes`: opens the endpoints instead of this process.

        Raises HostError if a port or a certificate cannot be used.
        """
        options = self._options
        keys = self.api_keys if options.api_key_file else None
        if processes is not None:
            self._clients = processes
            app = self.http_app = self._make_app(core, processes.receive_budget)
            services = admin_services(core, keys)
            self.grpc_service = make_grpc_service(options, core, services, keys)
            await processes.start(core, services, app, keys)
            self.grpc_port, self.http_port = processes.grpc_port, processes.http_port
            return
        clients = self._clients = ClientEndpoints(options, connection_hooks)
        clients.receive_budget.reserve_block = reserve_block
        service = make_grpc_service(options, core, admin_services(core, keys), keys)
        self.grpc_service = service
        if options.allow_grpc:
            self.grpc_port = await clients.open_grpc(service)
        app = self.http_app = self._make_app(core, clients.receive_budget)
        if options.allow_http:
            self.http_port = await clients.open_http(app, self._http_tls)

    def _make_app(self, core: Core, receive_budget: ReceiveBudget) -> HttpApp:
        return HttpApp(core, self._options, self._model_families, receive_budget, self.api_keys)

    async def start_metrics(self, families: Callable[[], Iterable[MetricFamily]]) -> None:
        """Opens the metrics endpoint. Raises HostError."""
        address = self._options.metrics_host
        timeouts = make_timeouts(self._options)
        self._metrics = HttpListener(
            MetricsApp(families), address, self._options.metrics_port, timeouts=timeouts
        )
        self.metrics_port = await start_service("Metrics", self._metrics.start())

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
        if self.grpc_port:
            yield _GRPC_SERVICE, f"{options.grpc_address}:{self.grpc_port}"
        if self.http_port:
            yield _HTTP_SERVICE, f"{options.http_address}:{self.http_port}"
        if self._metrics is not None:
            yield _METRICS_SERVICE, f"{options.metrics_host}:{self.metrics_port}"

    async def reload_tls(self) -> None:
        """Reads the TLS files again, for new connections; logs the result."""
        if self._clients is not None:
            await self._clients.reload_tls()

    async def drain(self, deadline: float) -> bool:
        """Refuses new requests, and waits for open ones until `deadline` (loop time).

        Returns whether all were answered. Health requests are still answered.
        """
        clients, app, service = self._clients, self.http_app, self.grpc_service
        options = self._options
        if clients is None or app is None or service is None:
            return True
        serves_app = isinstance(clients, ClientEndpoints) and options.allow_http

        def report(left: float) -> None:
            others = 0 if serves_app else app.open_requests
            _log.info(
                "Timeout %d: Found %d HTTP service connections",
                left,
                clients.open_http_requests + others,
            )
            if options.allow_grpc:
                _log.info(
                    "Timeout %d: Found %d gRPC service connections and inference handlers",
                    left,
                    clients.open_grpc_requests,
                )

        left = max(0.0, deadline - asyncio.get_running_loop().time())
        draining = asyncio.gather(clients.drain(left), app.drain(left), service.drain(left))
        await wait_with_reports(draining, deadline, report)
        return all(await draining)

    async def stop(self, deadline: float) -> None:
        """Closes all endpoints but metrics by `deadline`, and cuts off what is still open."""
        clients, self._clients = self._clients, None
        self.http_app = self.grpc_service = None
        if clients is not None:
            await clients.stop(max(0.0, deadline - asyncio.get_running_loop().time()))

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

    Returns whether the work has ended; otherwise it continues.
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
        raise logged_failure(service, error, hint) from error
