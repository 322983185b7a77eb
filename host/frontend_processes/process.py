"""A frontend process: accepts connections, and speaks to the core."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import setproctitle

from host.frontend_processes import messages as m
from host.frontend_processes.core_link import CoreLink, end_without_memory
from host.frontend_processes.core_proxy import CoreProxy
from host.frontend_processes.forwarding import Forwarder
from host.frontend_processes.frontend_memory import FrontendMemory
from host.frontend_processes.sandbox import restrict_process
from host.frontend_processes.shared_budget import SharedReceiveBudget
from host.frontend_processes.spawn import FrontendSpawn
from host.frontends.client_endpoints import (
    ClientEndpoints,
    create_http_tls,
    grpc_tls,
    http_restrictions,
    http_tls,
    make_grpc_service,
)
from host.frontends.http.inference_app import InferenceApp
from host.frontends.request_headers import HeaderForwarding
from host.instances.arenas import HOST_ARENA
from host.instances.busy_polling import no_connection_hook
from host.options.options import Options
from stub.wire.messages import BlockRelease, CloseArena

_log = logging.getLogger("pbhost")

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 30.0  # until the core has sent the options


class FrontendProcess:
    """The endpoints of one process. Its methods belong to the event loop."""

    def __init__(self, spawn: FrontendSpawn) -> None:
        self._spawn = spawn
        loop = asyncio.get_running_loop()
        self._start: asyncio.Future[m.Start] = loop.create_future()
        self._stopped: asyncio.Future[None] = loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoints: ClientEndpoints | None = None
        self._core: CoreProxy | None = None
        self._memory = FrontendMemory(
            spawn.arena,
            spawn.arena_fd,
            spawn.limit,
            lambda: self._link.read_arenas(),
            lambda: self._link.flush_releases(),
        )
        self._memory.open_arena(HOST_ARENA, spawn.host_arena_fd, spawn.limit)
        self._link = CoreLink(
            spawn.rings,
            (spawn.to_frontend, spawn.to_core),
            socket.socket(fileno=spawn.control),
            self._on_message,
            self._memory.open_arena,
            self._memory.collect_releases,
        )
        self._forwarder = Forwarder(self._link)

    async def run(self) -> None:
        """Serves until the core says that the process ends. Raises HostError."""
        _log.addHandler(CoreLogHandler(self._link))
        _log.setLevel(1)  # the core decides what is written
        _log.propagate = False
        asyncio.get_running_loop().set_exception_handler(_handle_failure)
        start = await asyncio.wait_for(self._start, _START_SECONDS)
        options = Options(**start.options)
        unrestricted = restrict_process(_tls_directories(options))
        core = self._core = CoreProxy(
            self._link, self._memory, start.loads_on_demand, start.needs_keys
        )
        spawn, forwarder = self._spawn, self._forwarder
        budget = SharedReceiveBudget(
            options.receive_buffer_limit, spawn.budget, spawn.budget_size, spawn.index
        )
        endpoints = self._endpoints = ClientEndpoints(options, no_connection_hook, budget, False)
        if spawn.grpc >= 0:
            service = make_grpc_service(
                options, core, forwarder.services(), core.keys, self._memory.reserve_block
            )
            await endpoints.open_grpc(service, socket.socket(fileno=spawn.grpc))
        if spawn.http >= 0:
            app = InferenceApp(
                core,
                forwarder,
                options.http_max_input_size,
                http_restrictions(options),
                HeaderForwarding(options.http_header_forward_pattern),
                endpoints.receive_budget,
                core.keys,
            )
            tls = await create_http_tls(options)
            await endpoints.open_http(app, tls, socket.socket(fileno=spawn.http))
        setproctitle.setproctitle(f"pbhost-frontend {spawn.index}")
        self._link.send(m.Hello(unrestricted))
        await self._stopped
        self._link.flush()

    def _on_message(self, message: m.ToFrontend) -> None:
        if isinstance(message, m.Response):
            assert self._core is not None
            self._core.handle_response(message)
        elif isinstance(message, m.RequestAccepted):
            assert self._core is not None
            self._core.request_accepted(message.number)
        elif isinstance(message, m.RequestTaken):
            assert self._core is not None
            self._core.request_taken(message.number)
        elif isinstance(message, BlockRelease):
            self._memory.release_blocks(message)
        elif isinstance(message, (m.ReceiveBody, m.SendHead, m.SendBody, m.EndExchange)):
            self._forwarder.handle(message)
        elif isinstance(message, CloseArena):
            self._memory.close_arena(message.arena)
        elif isinstance(message, m.Start):
            self._start.set_result(message)
        elif isinstance(message, m.Ping):
            self._link.send(m.Pong())
        elif isinstance(message, m.ReloadTls):
            self._run(self._reload_tls())
        elif isinstance(message, m.Drain):
            self._run(self._drain(message.seconds))
        elif isinstance(message, m.Stop):
            self._run(self._stop(message.seconds))

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_tls(self) -> None:
        if self._endpoints is not None:
            await self._endpoints.reload_tls()
        self._link.send(m.TlsReloaded())

    async def _drain(self, seconds: float) -> None:
        endpoints = self._endpoints
        if endpoints is None:
            return
        draining = asyncio.ensure_future(endpoints.drain(seconds))
        while not draining.done():
            self._link.send(
                m.OpenRequestCounts(endpoints.open_http_requests, endpoints.open_grpc_requests)
            )
            await asyncio.wait([draining], timeout=1.0)
        self._link.send(m.Drained(draining.result()))

    async def _stop(self, seconds: float) -> None:
        if self._endpoints is not None:
            await self._endpoints.stop(seconds)
        if not self._stopped.done():
            self._stopped.set_result(None)


def _tls_directories(options: Options) -> list[Path]:
    """The directories of the TLS files, which are read again after they have changed."""
    return [
        Path(name).resolve().parent
        for files in (grpc_tls(options), http_tls(options))
        if files is not None
        for name in (files.server_cert, files.server_key, files.root_cert)
        if name
    ]


class CoreLogHandler(logging.Handler):
    """Sends records to the log of the server. One about a MemoryError ends the process.

    An endpoint logs each defect and continues, but without memory messages may be lost.
    """

    def __init__(self, link: CoreLink) -> None:
        super().__init__()
        self._link = link
        self.setFormatter(logging.Formatter("%(message)s"))  # with the traceback, if there is one

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one record."""
        if record.exc_info and isinstance(record.exc_info[1], MemoryError):
            end_without_memory()
        with suppress(TypeError, ValueError, OverflowError):  # a text that cannot be sent
            text = self.format(record)
            self._link.send(m.LogRecord(record.levelno, record.pathname, record.lineno, text))


def _handle_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles an exception of a callback."""
    error = context.get("exception")
    if isinstance(error, MemoryError):
        end_without_memory()
    _log.error("unexpected failure: %s", context["message"], exc_info=error)


def _set_up_process() -> None:
    """Ends the process with the core, which alone decides when it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def run_frontend(argument: str) -> None:
    """Runs a frontend process until its end; `argument` is a `FrontendSpawn`."""
    from host.system.event_loop import run_event_loop
    from stub.wire.heap import freeze_gc, tune_malloc

    spawn = FrontendSpawn.load(argument)
    _set_up_process()
    tune_malloc(one_heap=True)
    freeze_gc()

    async def run() -> None:
        await FrontendProcess(spawn).run()

    run_event_loop(run())
    os._exit(0)  # nothing is left to finalize
