"""A frontend process: accepts connections, speaks to the core, and has few rights.

Landlock limits the files that it may open, and seccomp forbids it to start processes. Source: the
kernel's Documentation/userspace-api/landlock.rst and seccomp_filter.rst.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import platform
import signal
import socket
import struct
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import setproctitle

from host.frontend_processes import frontend_messages as m
from host.frontend_processes.core_link import CoreLink, end_without_memory
from host.frontend_processes.core_proxy import CoreProxy
from host.frontend_processes.exchanged_memory import FrontendMemory
from host.frontend_processes.frontend_link import FrontendSpawn, SharedReceiveBudget
from host.frontends.client_endpoints import (
    ClientEndpoints,
    create_http_tls,
    grpc_tls,
    http_tls,
    make_grpc_service,
)
from host.frontends.grpc.grpc_admin import ADMIN_METHODS
from host.frontends.grpc.methods import RpcContext, Services, UnaryMethod
from host.frontends.http.inference_app import ForwardingApp
from host.frontends.http1.asgi import RAW_HEADER_NAMES, Message, Receive, Send
from host.instances.arenas import HOST_ARENA
from host.instances.busy_polling import no_connection_hook
from host.options.options import Options
from stub.wire.messages import BlockRelease, CloseArena

_log = logging.getLogger("pbhost")


ExchangeMessage = m.ReceiveBody | m.SendHead | m.SendBody | m.EndExchange


class Forwarder:
    """Passes gRPC calls and HTTP requests on to the core. Belongs to the event loop."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._exchanges: dict[int, asyncio.Queue[ExchangeMessage]] = {}

    def services(self) -> Services:
        """The gRPC methods that the core answers."""
        return {
            service: [
                UnaryMethod(name, partial(self._call_rpc, service, name), category)
                for name, category in methods.items()
            ]
            for service, methods in ADMIN_METHODS.items()
        }

    async def _call_rpc(self, service: str, method: str, data: bytes, context: RpcContext) -> bytes:
        number = next(self._link.numbers)
        authorization = context.metadata("authorization")
        return await self._link.ask(m.CallRpc(number, service, method, data, authorization), number)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Lets the core answer one HTTP request; an ASGI 3 application."""
        number = next(self._link.numbers)
        commands = self._exchanges[number] = asyncio.Queue[ExchangeMessage]()
        ended = False
        try:
            self._link.send(
                m.OpenExchange(
                    number,
                    scope["method"],
                    scope["raw_path"],
                    scope.get("query_string", b""),
                    scope["headers"],
                    scope.get("extensions", {}).get(RAW_HEADER_NAMES),
                )
            )
            try:
                while not ended:
                    ended = await self._obey(await commands.get(), receive, send)
            except asyncio.CancelledError:
                # The client has gone, or this process stops; the core may still send an error.
                self._link.send(m.Cancel(number))
                while not ended:
                    ended = await self._obey(await commands.get(), receive, send)
        finally:
            del self._exchanges[number]
            if not ended:  # this process has failed
                self._link.send(m.Cancel(number))
                while not commands.empty():
                    self._decline(commands.get_nowait())

    async def _obey(self, command: ExchangeMessage, receive: Receive, send: Send) -> bool:
        """Does what the application in the core asks for; returns whether that was the last."""
        number = command.number
        if isinstance(command, m.EndExchange):
            return True
        if isinstance(command, m.ReceiveBody):
            part = await receive()
            gone = part["type"] != "http.request"
            body, more = part.get("body", b""), part.get("more_body", False)
            self._link.send(m.ExchangeBody(number, body, more, gone))
            return False
        try:
            if isinstance(command, m.SendHead):
                headers = command.headers
                await send(
                    {"type": "http.response.start", "status": command.status, "headers": headers}
                )
            else:
                await send(
                    {"type": "http.response.body", "body": command.body, "more_body": command.more}
                )
        finally:  # the core waits for as many as it has sent
            self._link.send(m.ExchangeSent(number))
        return False

    def handle(self, message: ExchangeMessage) -> None:
        """Takes a message about an HTTP request; that may have ended."""
        commands = self._exchanges.get(message.number)
        if commands is not None:
            commands.put_nowait(message)
        else:
            self._decline(message)

    def _decline(self, command: ExchangeMessage) -> None:
        """Answers the application in the core as if the client had gone, so that it ends."""
        if isinstance(command, m.ReceiveBody):
            self._link.send(m.ExchangeBody(command.number, b"", False, True))
        elif not isinstance(command, m.EndExchange):
            self._link.send(m.ExchangeSent(command.number))


_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION_FLAG, _LANDLOCK_RULE_PATH_BENEATH = 1, 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15}  # the number of rights on files, by version
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3

_LOAD, _EQUAL, _GREATER_OR_EQUAL, _BITS_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of BPF
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000


@dataclass(frozen=True)
class _Machine:
    """The number of an architecture, and of its system calls that start a process."""

    audit: int
    refused: tuple[int, ...]  # execve, execveat, fork, vfork
    clone: int


_CLONE3 = 435
_MACHINES = {
    "x86_64": _Machine(0xC000003E, (59, 322, 57, 58), 56),
    "aarch64": _Machine(0xC00000B7, (221, 281), 220),
}


class _Program(ctypes.Structure):
    """The `sock_fprog` of the kernel."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def restrict_process(readable: Iterable[Path]) -> list[str]:
    """Lets the process open only what it has open, its own code and `readable`, and only to read.

    It may start no process either. Returns what the kernel does not support. Threads that run
    already are not restricted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    missing: list[str] = []
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return ["limits on files and processes"]
    if not _restrict_files(libc, [*_code_directories(), *readable]):
        missing.append("a limit on the files that it may open (Landlock)")
    if not _forbid_processes(libc):
        missing.append("a ban on starting processes (seccomp)")
    return missing


def _code_directories() -> list[Path]:
    """The directories of Python, of installed packages, and of this project."""
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    root = Path(__file__).resolve().parents[2]
    return [*installed, *(root / package for package in ("host", "stub", "pb_utils"))]


def _restrict_files(libc: ctypes.CDLL, readable: Iterable[Path]) -> bool:
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION_FLAG)
    if version < 1:
        return False
    rights = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    attributes = struct.pack("<Q", rights)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path in readable:
            with suppress(OSError):  # what does not exist cannot be read
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    rule = struct.pack("<Qi", _READ_FILE | _READ_DIR, descriptor)
                    libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
                finally:
                    os.close(descriptor)
        return bool(libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _forbid_processes(libc: ctypes.CDLL) -> bool:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    code = _filter(machine)
    program = _Program(len(code) // 8, code)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)) == 0)


def _filter(machine: _Machine) -> bytes:
    """A BPF program: threads may be started, and everything else that starts a process fails."""
    refuse, allow = _ERRNO | errno.EPERM, _ALLOW
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, refuse),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER_OR_EQUAL, 0, 1, _X32),
        (_RETURN, 0, 0, refuse),
    ]
    for number in machine.refused:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    steps += [
        (_EQUAL, 0, 1, _CLONE3),  # its flags are in memory; the C library calls clone then
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 1, 0, machine.clone),
        (_RETURN, 0, 0, allow),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_BITS_SET, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, allow),
        (_RETURN, 0, 0, refuse),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


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
        budget.reserve_block = self._memory.reserve_block
        endpoints = self._endpoints = ClientEndpoints(options, no_connection_hook, budget, False)
        if spawn.grpc >= 0:
            service = make_grpc_service(options, core, forwarder.services(), core.keys)
            await endpoints.open_grpc(service, socket.socket(fileno=spawn.grpc))
        if spawn.http >= 0:
            app = ForwardingApp(core, forwarder, options, endpoints.receive_budget, core.keys)
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
