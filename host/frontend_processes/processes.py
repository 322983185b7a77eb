"""The frontend processes of a server: started, replaced when they die, drained and stopped."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from host.access.api_keys import ApiKeys
from host.core import Core
from host.errors import internal
from host.frontend_processes.core_link import OUT_OF_MEMORY_STATUS
from host.frontend_processes.frontend_connection import FrontendConnection
from host.frontend_processes.frontend_link import BudgetFile, FrontendSpawn, SharedReceiveBudget
from host.frontend_processes.frontend_messages import (
    Drain,
    Drained,
    Ping,
    ReloadTls,
    Start,
    Stop,
    TlsReloaded,
)
from host.frontends.client_endpoints import grpc_tls, http_tls, start_service
from host.frontends.grpc.methods import Services
from host.frontends.http.inference_app import InferenceApp
from host.frontends.sockets import listening_socket
from host.frontends.tls import TlsFiles, TlsReloader
from host.instances.arenas import Arenas
from host.instances.busy_polling import ConnectionHooks
from host.instances.launchers import ChildProcess, InterpreterSpawner
from host.instances.stub_process import RestartBackoff, describe_exit
from host.options.options import Options

_ENTRY = str(Path(__file__).with_name("__main__.py"))
_START_SECONDS = 60.0  # of the interpreter and its imports, on a fully loaded machine
_ENDPOINT_OPTIONS = (
    "http_",
    "grpc_",
    "allow_http",
    "allow_grpc",
    "reuse_",
    "allow_metrics",
    "metrics_",
)
"""Prefixes of the fields that matter to endpoints; those of metrics exclude their ports."""
_PING_SECONDS = 2.0
_MISSED_PINGS = 5  # then the process hangs
_RELOAD_SECONDS = 10.0  # until a process has read the TLS files again
_STOP_SECONDS = 5.0  # beyond the time that the process has to close its connections
_FIRST_PAUSE, _MAX_PAUSE = 1.0, 10.0  # seconds before a process that dies again is restarted
_PROVEN_SECONDS = 10.0  # of service, after which earlier deaths no longer count

_log = logging.getLogger("pbhost")


class FrontendProcesses:
    """Opens the gRPC and HTTP endpoints of a server in processes of their own.

    All of them accept from the same listening sockets, which this process holds. Belongs to the
    event loop.
    """

    def __init__(
        self, options: Options, count: int, arenas: Arenas, connection_hooks: ConnectionHooks
    ) -> None:
        """`count`: the number of processes. `connection_hooks`: called about requests of each."""
        self._options = options
        self._arenas = arenas
        self._connection_hooks = connection_hooks
        self.spawner = InterpreterSpawner()
        """Starts the processes."""
        self._tls_reloader = TlsReloader()
        # One more, for the requests that are passed on to this process.
        self._budget = BudgetFile(count + 1)
        self.receive_budget = SharedReceiveBudget(
            options.receive_buffer_limit, self._budget.fd, self._budget.size, count
        )
        """The budget of requests that are passed on to this process."""
        self._frontends = [_Frontend(index, self) for index in range(count)]
        self._grpc: socket.socket | None = None
        self._http: socket.socket | None = None
        self._app: InferenceApp | None = None
        self._services: Services = {}
        self._core: Core | None = None
        self._api_keys: ApiKeys | None = None
        self._generation = 0
        self._pinging: asyncio.TimerHandle | None = None
        self.stopping = False
        self.drain_seconds: float | None = None  # of processes that start while others drain

    @property
    def grpc_port(self) -> int:
        """The gRPC port, 0 without gRPC."""
        return 0 if self._grpc is None else int(self._grpc.getsockname()[1])

    @property
    def http_port(self) -> int:
        """The HTTP port, 0 without HTTP."""
        return 0 if self._http is None else int(self._http.getsockname()[1])

    async def start(
        self, core: Core, services: Services, app: InferenceApp, api_keys: ApiKeys | None
    ) -> None:
        """Opens the ports and starts the processes; returns when all accept connections.

        `services` and `app` answer what the processes pass on. `api_keys`: what clients need.
        Raises HostError.
        """
        options = self._options
        self._api_keys = api_keys
        self._core, self._services, self._app = core, services, app
        if options.allow_grpc:
            self._grpc = await start_service(
                "GRPC",
                _listen(options.grpc_address, options.grpc_port, options.reuse_grpc_port),
            )
        if options.allow_http:
            self._http = await start_service(
                "HTTP",
                _listen(options.http_address, options.http_port, options.reuse_http_port),
            )
        core.add_watcher(self._show_state)
        await asyncio.gather(*(frontend.start() for frontend in self._frontends))
        loop = asyncio.get_running_loop()
        for files in (
            grpc_tls(options) if options.allow_grpc else None,
            http_tls(options) if options.allow_http else None,
        ):
            if files is not None:
                await self._tls_reloader.add(files, partial(self._reload_tls, files, loop))
        self._pinging = asyncio.get_running_loop().call_later(_PING_SECONDS, self._ping)

    def open_connection(
        self, name: str, on_fault: Callable[[Exception], None]
    ) -> FrontendConnection:
        """The connection of a new process. Raises OSError."""
        assert self._core is not None and self._app is not None
        connection = FrontendConnection(
            name,
            self._core,
            self._services,
            self._app,
            self._api_keys,
            self._arenas,
            self._connection_hooks(),
            on_fault,
        )
        self._show_state_to(connection)
        options, needs_keys = _encode_options(self._options), self._api_keys is not None
        connection.send(Start(options, self._core.loads_on_demand, needs_keys))
        return connection

    def spawn_arguments(self, index: int, connection: FrontendConnection) -> FrontendSpawn:
        """The arguments of a new process."""
        grpc, http = (-1 if one is None else one.fileno() for one in (self._grpc, self._http))
        return connection.spawn_arguments(index, grpc, http, self._budget)

    def process_ended(self, index: int) -> None:
        """Frees what the requests have reserved that a process was receiving."""
        self._budget.clear(index)

    def _show_state(self) -> None:
        """Shows all processes that models or trace settings have changed."""
        self._generation += 1
        for frontend in self._frontends:
            if frontend.connection is not None:
                self._show_state_to(frontend.connection)

    def _show_state_to(self, connection: FrontendConnection) -> None:
        assert self._core is not None
        connection.state.show_generation(self._generation)
        connection.state.show_tracing(self._core.request_tracer is not None)

    def _ping(self) -> None:
        self._pinging = asyncio.get_running_loop().call_later(_PING_SECONDS, self._ping)
        for frontend in self._frontends:
            frontend.ping()

    @property
    def open_http_requests(self) -> int:
        """The number of open inference requests over HTTP, as the processes last told it."""
        return sum(one.connection.open_http for one in self._frontends if one.connection)

    @property
    def open_grpc_requests(self) -> int:
        """The number of open inference requests over gRPC, as the processes last told it."""
        return sum(one.connection.open_grpc for one in self._frontends if one.connection)

    async def reload_tls(self) -> None:
        """As `ClientEndpoints.reload_tls`."""
        await self._tls_reloader.reload()

    def _reload_tls(self, files: TlsFiles, loop: asyncio.AbstractEventLoop) -> None:
        """Checks files, and lets all processes read them. Blocks. Raises HostError INVALID_ARG."""
        files.create_context()
        asyncio.run_coroutine_threadsafe(self._reload_in_processes(), loop).result()

    async def _reload_in_processes(self) -> None:
        await asyncio.gather(*(frontend.reload_tls() for frontend in self._frontends))

    async def drain(self, seconds: float) -> bool:
        """As `ClientEndpoints.drain`, without what is passed on to this process."""
        self.drain_seconds = seconds
        draining = [frontend.drain(seconds) for frontend in self._frontends]
        return all(await asyncio.gather(*draining))

    async def stop(self, seconds: float) -> None:
        """As `ClientEndpoints.stop`; the processes end."""
        self.stopping = True
        await self._tls_reloader.close()
        if self._pinging is not None:
            self._pinging.cancel()
        for listening in (self._grpc, self._http):
            if listening is not None:
                listening.close()  # with the last process that stops, clients cannot connect
        self._grpc = self._http = None
        await asyncio.gather(*(frontend.stop(seconds) for frontend in self._frontends))
        self._app = self._core = None
        self._services = {}
        self._budget.close()
        await asyncio.to_thread(self.spawner.close)


class _Frontend:
    """One frontend process, and its successors."""

    def __init__(self, index: int, processes: FrontendProcesses) -> None:
        self._name = f"pbhost-frontend {index}"
        self._index = index
        self._processes = processes
        self.connection: FrontendConnection | None = None
        self._child: ChildProcess | None = None
        self._exited: asyncio.Future[None] | None = None
        self._backoff = RestartBackoff(_FIRST_PAUSE, _MAX_PAUSE, _PROVEN_SECONDS)
        self._missed_pings = 0
        self._fault = ""
        self._replacing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the process; returns when it accepts connections. Raises HostError."""
        processes = self._processes
        self._fault, self._missed_pings = "", 0
        self._backoff.process_started()
        try:
            connection = processes.open_connection(self._name, self._on_fault)
        except OSError as error:
            raise internal(f"cannot start {self._name}: {error.strerror}") from error
        self.connection = connection
        exited = self._exited = asyncio.get_running_loop().create_future()
        spawn = processes.spawn_arguments(self._index, connection)
        launching = asyncio.ensure_future(
            processes.spawner.launch(
                [sys.executable, _ENTRY, spawn.dump()],
                spawn.descriptors,
                lambda code: self._on_exit(connection, exited, code),
            )
        )
        try:
            # Also if this is cancelled: the process starts all the same, and must be ended.
            self._child = await asyncio.shield(launching)
        except OSError as error:
            connection.close()
            exited.set_result(None)
            raise internal(f"cannot start {self._name}: {error.strerror}") from error
        except asyncio.CancelledError:
            with suppress(OSError):
                self._child = await launching
                self._child.kill()
            raise
        connection.process_started()
        try:
            await asyncio.wait_for(asyncio.shield(connection.hello), _START_SECONDS)
        except asyncio.TimeoutError:
            self._fault = f"it did not start within {_START_SECONDS:g} s"
            self._child.kill()
            await exited
        if exited.done():
            raise internal(f"{self._name} did not start: {self._fault}")
        if processes.drain_seconds is not None:
            connection.send(Drain(processes.drain_seconds))

    def _on_fault(self, error: Exception) -> None:
        self._fault = f"it broke the protocol: {error!r}"
        if self._child is not None:
            self._child.kill()

    def ping(self) -> None:
        """Kills the process if it no longer reacts."""
        connection, child = self.connection, self._child
        if connection is None or child is None or not connection.hello.done():
            return
        self._missed_pings = 0 if connection.pong else self._missed_pings + 1
        if self._missed_pings >= _MISSED_PINGS:
            self._fault = f"it did not respond within {_MISSED_PINGS * _PING_SECONDS:g} s"
            child.kill()
        else:
            connection.pong = False
            connection.send(Ping())

    def _on_exit(
        self, connection: FrontendConnection, exited: asyncio.Future[None], code: int
    ) -> None:
        self.connection = self._child = None
        started = connection.hello.done()
        reason = f"it {describe_exit(code)}"
        if code == OUT_OF_MEMORY_STATUS:
            self._fault = "it ran out of memory"
        if self._fault:
            reason += f", as {self._fault}"
        self._fault = reason
        exited.set_result(None)
        connection.close()
        self._processes.process_ended(self._index)
        if not started or self._processes.stopping:
            return
        _log.error("%s has ended: %s; its connections are closed", self._name, reason)
        if self._replacing is None:
            self._replacing = asyncio.ensure_future(self._replace())

    async def _replace(self) -> None:
        """Starts another process: at once, or after a pause if this one died soon."""
        try:
            while not self._processes.stopping:
                self._backoff.process_exited()
                await asyncio.sleep(self._backoff.pause)
                try:
                    await self.start()
                except Exception as error:  # the next attempt may succeed
                    _log.error("%s", error)
                else:
                    _log.info("%s was started again", self._name)
                    return
        finally:
            self._replacing = None

    async def drain(self, seconds: float) -> bool:
        """Lets the process drain; one that dies has nothing left to answer."""
        connection = self.connection
        if connection is None:
            return True
        try:
            reply = await connection.ask(Drain(seconds), Drained, seconds + _STOP_SECONDS)
        except asyncio.TimeoutError:
            return False
        return reply is None or reply.in_time

    async def reload_tls(self) -> None:
        """Lets the process read the TLS files again; one that starts or dies does so anyway."""
        if self.connection is not None:
            with suppress(asyncio.TimeoutError):
                await self.connection.ask(ReloadTls(), TlsReloaded, _RELOAD_SECONDS)

    async def stop(self, seconds: float) -> None:
        """Ends the process, and waits for its end."""
        replacing = self._replacing
        if replacing is not None:
            replacing.cancel()
            await asyncio.wait([replacing])
        connection, exited = self.connection, self._exited
        if connection is None or exited is None:
            return
        connection.send(Stop(seconds))
        await asyncio.wait([exited], timeout=seconds + _STOP_SECONDS)
        if not exited.done():
            if self._child is not None:
                self._child.kill()
            await exited


async def _listen(address: str, port: int, reuse_port: bool) -> socket.socket:
    return listening_socket(address, port, reuse_port)


def _encode_options(options: Options) -> dict[str, Any]:
    """The options of the endpoints, by field."""
    chosen = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name.startswith(_ENDPOINT_OPTIONS)
    }
    chosen["receive_buffer_byte_size"] = options.receive_buffer_limit
    return chosen
