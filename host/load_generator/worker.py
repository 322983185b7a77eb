"""A worker process of the load generator: carries a job out, and reports what it measures."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import islice
from time import perf_counter
from typing import Any

from host.load_generator.http1_connection import Http1Connection
from host.load_generator.http2_connection import Http2Connection, encode_headers
from host.load_generator.job import (
    FRAME_SIZE,
    Command,
    Cut,
    Failed,
    Job,
    Measured,
    Protocol,
    Report,
    Slice,
    Stop,
    Stopped,
    Target,
    decode_command,
    encode,
)
from host.load_generator.schedule import Timer, arrival_times
from host.load_generator.senders import SENDERS, Chain, Sender
from host.system.event_loop import run_event_loop

_STREAMS_PER_CONNECTION = 6  # as Triton's clients share their channels
_OPEN_LOOP_CONNECTIONS = 8  # for gRPC
_MOST_SENDERS = 4096  # in open loop, with gRPC
_MOST_CONNECTIONS = 512  # in open loop, each for one request; more requests wait
_CONNECT_SECONDS = 10.0
_ATTEMPTS, _PAUSE = 20, 0.1  # to open a lost connection again
_WATCH_SECONDS = 0.5
_END_SECONDS = 2.0  # for the last request of a sequence, and the one before it
_LAST_SECONDS = 0.2  # for the last response of other requests
_GARBAGE = 100_000  # objects between two collections: requests leave no cycles


class NoServer(Exception):
    """No server answers at the address."""


def run_worker(descriptor: int) -> None:
    """Carries out the commands that arrive on a socket, until the other end closes it."""
    gc.set_threshold(_GARBAGE)
    with socket.socket(fileno=descriptor) as commands:
        run_event_loop(_Worker().run(commands))


class _Worker:
    """Reads commands and carries them out."""

    def __init__(self) -> None:
        self._load: Load | None = None

    async def run(self, commands: socket.socket) -> None:
        """Returns when the other end has closed the connection."""
        reader, self._writer = await asyncio.open_connection(sock=commands)
        try:
            while True:
                size = FRAME_SIZE.unpack(await reader.readexactly(FRAME_SIZE.size))[0]
                await self._carry_out(decode_command(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            if self._load is not None:
                self._load.close()

    async def _carry_out(self, command: Command) -> None:
        if isinstance(command, Job):
            await self._finish()
            self._load = Load(command, self._report)
            self._load.start()
        elif isinstance(command, Cut):
            if self._load is not None:
                self._report(self._load.cut())
        else:
            assert isinstance(command, Stop)
            await self._finish()
            self._report(Stopped())

    async def _finish(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            await load.finish()

    def _report(self, report: Report) -> None:
        data = encode(report)
        self._writer.write(FRAME_SIZE.pack(len(data)) + data)


class Load:
    """The load of a job. `report` gets its failure, if no server answers."""

    def __init__(self, job: Job, report: Callable[[Report], None]) -> None:
        self._job = job
        self._target = job.target
        self._report = report
        ends = job.ends or [b""] * len(job.chains)
        self._chains = [Chain(*pair) for pair in zip(job.chains, ends, strict=True)]
        self._measured = Measured()
        self._senders: list[Any] = []
        self._idle: list[Sender] = []
        self._backlog: deque[float] = deque()
        self._connections: list[Any] = []
        self._next_connection = 0
        self._opening = 0
        self._started = self._completed = 0
        self._began = self._finished = 0.0
        self._stopped = False
        self._ending: set[Sender] = set()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._tls = _tls_context(job.target) if job.target.tls else None
        self._cut_at = perf_counter()
        self._cpu_at, self._waited_at = _cpu_times()

    def start(self) -> None:
        """Connects and begins."""
        self._spawn(self._run_closed() if self._job.concurrency else self._run_open())
        self._watch_timeouts()

    async def finish(self) -> None:
        """Waits for responses and ends open sequences, but not for long, and closes everything."""
        if self._stopped:
            return
        self._stop()
        self._ending.update(one for one in self._senders if one.busy or one.chain.is_open)
        for sender in [one for one in self._ending if not one.busy]:
            self._end_sequence(sender)
        if self._ending:
            self._ended.clear()
            with suppress(asyncio.TimeoutError):
                seconds = _END_SECONDS if self._job.ends else _LAST_SECONDS
                await asyncio.wait_for(self._ended.wait(), seconds)
        self.close()

    def _stop(self) -> None:
        """Sends no more requests of the load."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self._timer is not None:
            asyncio.get_running_loop().remove_reader(self._timer.descriptor)
            self._timer.close()
            self._timer = None

    def close(self) -> None:
        """Closes everything."""
        self._stop()
        for connection in {*self._connections, *(one.connection for one in self._senders)}:
            connection.close()

    def cut(self) -> Slice:
        """Returns what was measured since the last call."""
        now, (cpu, waited) = perf_counter(), _cpu_times()
        measured, self._measured = self._measured, Measured()
        for sender in self._senders:
            if sender not in self._ending:
                sender.measured = self._measured
        made = Slice(
            now - self._cut_at,
            measured.latencies.tobytes(),
            measured.first.tobytes(),
            measured.gaps.tobytes(),
            measured.lateness.tobytes(),
            measured.responses,
            measured.failures,
            measured.messages,
            cpu - self._cpu_at,
            waited - self._waited_at,
            len(self._backlog),
            self._began,
            self._finished,
        )
        self._cut_at, self._cpu_at, self._waited_at = now, cpu, waited
        return made

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not self._stopped:
            self.close()
            self._report(Failed(str(error)))
        if not isinstance(error, NoServer):
            raise error

    async def _run_closed(self) -> None:
        """Opens all senders and starts each."""
        for number in range(self._job.concurrency):
            connection = await self._find_connection(number // _STREAMS_PER_CONNECTION)
            self._add_sender(connection)
        self._began = perf_counter()
        for sender in self._senders:
            self._continue(sender)

    async def _run_open(self) -> None:
        """Opens the first connections and starts the timer."""
        if self._shares_connections:
            for number in range(_OPEN_LOOP_CONNECTIONS):
                await self._find_connection(number)
        else:
            self._idle.append(self._add_sender(await self._find_connection(0)))
        self._timer = Timer()
        job = self._job
        self._began = perf_counter() + job.offset
        self._arrivals = arrival_times(self._began, job.rate, job.poisson, job.seed)
        if job.requests:
            self._arrivals = islice(self._arrivals, job.requests)
        self._due: float | None = next(self._arrivals)
        asyncio.get_running_loop().add_reader(self._timer.descriptor, self._send_due)
        self._timer.set(self._due)

    @property
    def _shares_connections(self) -> bool:
        return self._target.protocol in (Protocol.GRPC, Protocol.GRPC_STREAM)

    def _send_due(self) -> None:
        """Sends all requests that are due, and sets the timer for the next one."""
        timer = self._timer
        assert timer is not None
        timer.acknowledge()
        now = perf_counter()
        while self._due is not None and self._due <= now:
            self._backlog.append(self._due)
            self._measured.lateness.append(now - self._due)
            self._due = next(self._arrivals, None)
        self._send_backlog()
        if self._due is not None:
            timer.set(self._due)

    def _send_backlog(self) -> None:
        while self._backlog:
            sender = self._take_idle()
            if sender is None:
                return
            sender.send(self._backlog.popleft(), perf_counter())

    def _take_idle(self) -> Sender | None:
        """Returns a sender; None if there is none now, and maybe one is on its way."""
        while self._idle:
            sender = self._idle.pop()
            if sender.is_usable:
                return sender
            if not sender.connection.is_open:
                self._replace(sender)
                continue
            connection = self._connection_with_room()
            if connection is None:
                self._idle.append(sender)
                return None
            sender.use_connection(connection)
            return sender
        if not self._shares_connections:
            if len(self._senders) + self._opening < _MOST_CONNECTIONS:
                if self._opening < len(self._backlog):
                    self._opening += 1
                    self._spawn(self._open_sender())
            return None
        if len(self._senders) >= _MOST_SENDERS:
            return None
        connection = self._connection_with_room()
        return None if connection is None else self._add_sender(connection)

    def _connection_with_room(self) -> Any:
        """Returns the next connection on which the server takes another stream, or None."""
        for _ in self._connections:
            self._next_connection += 1
            connection = self._connections[self._next_connection % len(self._connections)]
            if connection.has_room and connection.is_open:
                return connection
        return None

    async def _open_sender(self) -> None:
        try:
            self._idle.append(self._add_sender(await self._find_connection(0)))
        finally:
            self._opening -= 1
        self._send_backlog()

    def _add_sender(self, connection: Any) -> Sender:
        chain = self._chains[len(self._senders) % len(self._chains)]
        kind: Any = SENDERS[self._target.protocol]
        sender: Sender = kind(connection, chain, self._measured, self._on_free)
        self._senders.append(sender)
        return sender

    def _on_free(self, sender: Sender) -> None:
        if sender in self._ending:
            self._end_sequence(sender)
            return
        self._completed += 1
        if self._completed == self._job.requests:
            self._finished = perf_counter()
        if not self._stopped:
            self._continue(sender)

    def _end_sequence(self, sender: Sender) -> None:
        """Sends the last request of a sequence, which is not measured, or notes that it ended."""
        if sender.chain.is_open and sender.is_usable:
            self._ending.add(sender)
            sender.chain.cut_off()
            sender.measured = Measured()
            now = perf_counter()
            sender.send(now, now)
            return
        self._ending.discard(sender)
        if not self._ending:
            self._ended.set()

    def _continue(self, sender: Sender) -> None:
        """Uses a free sender again."""
        if not self._job.concurrency:
            self._idle.append(sender)
            self._send_backlog()
        elif not sender.is_usable:
            self._replace(sender)
        elif not self._job.requests or self._started < self._job.requests:
            self._started += 1
            now = perf_counter()
            sender.send(now, now)
        else:
            self._end_sequence(sender)  # another one may wait for its slot in the server

    def _replace(self, sender: Sender) -> None:
        self._spawn(self._reconnect(sender))

    async def _reconnect(self, sender: Sender) -> None:
        """Gives a sender another connection, or waits for room in its own. Raises NoServer."""
        for _ in range(_ATTEMPTS):
            old = sender.connection
            if not old.is_open:
                sender.use_connection(await self._find_successor(old))
            if sender.is_usable or not self._job.concurrency:
                self._continue(sender)
                return
            await asyncio.sleep(_PAUSE)
        raise NoServer(f"{self._target.address} takes no more streams of a connection")

    async def _find_successor(self, old: Any) -> Any:
        """Returns the connection that takes the place of a lost one, for all of its senders."""
        if not self._shares_connections:
            return await self._connect_again()
        if old.successor is None:
            old.successor = asyncio.ensure_future(self._connect_again())
        connection = await asyncio.shield(old.successor)
        self._connections = [connection if one is old else one for one in self._connections]
        return connection

    async def _connect_again(self) -> Any:
        for _ in range(_ATTEMPTS - 1):
            with suppress(NoServer):
                return await self._connect()
            await asyncio.sleep(_PAUSE)
        return await self._connect()

    async def _find_connection(self, number: int) -> Any:
        """Returns a connection for a new sender: with gRPC, that with this number."""
        if not self._shares_connections:
            return await self._connect()
        if number >= len(self._connections):
            self._connections.append(await self._connect())
        return self._connections[-1]

    async def _connect(self) -> Any:
        """Raises NoServer."""
        try:
            return await asyncio.wait_for(self._open_connection(), _CONNECT_SECONDS)
        except (OSError, asyncio.TimeoutError) as error:
            why = str(error) or f"no connection within {_CONNECT_SECONDS:.0f} s"
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                why += f"; a process of the client may open {limit}: raise ulimit -n"
            raise NoServer(f"no answer from {self._target.address}: {why}") from error

    async def _open_connection(self) -> Any:
        target, loop = self._target, asyncio.get_running_loop()
        connection: Any
        _, connection = await loop.create_connection(
            self._make_connection, target.host, target.port, ssl=self._tls
        )
        await connection.ready
        return connection

    def _make_connection(self) -> Http1Connection | Http2Connection:
        target = self._target
        if self._shares_connections:
            return Http2Connection(encode_headers(target.headers))
        return Http1Connection(target.protocol is Protocol.HTTP_EVENTS)

    def _watch_timeouts(self) -> None:
        """Gives up the requests that take too long."""
        oldest = perf_counter() - self._job.timeout
        for sender in [one for one in self._senders if one.busy and one.sent < oldest]:
            sender.abandon()
        if not self._stopped:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(_WATCH_SECONDS, self._watch_timeouts)


def _tls_context(target: Target) -> ssl.SSLContext:
    """As the clients of gRPC and of Python's HTTP have it, with their variables."""
    roots, certificate, key = target.certificates
    context = ssl.create_default_context(cafile=roots or None)
    if certificate:
        context.load_cert_chain(certificate, key)
    if target.protocol in (Protocol.GRPC, Protocol.GRPC_STREAM):
        roots = roots or os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "")
        if roots:
            context.load_verify_locations(roots)
        context.set_alpn_protocols(["h2"])
    return context


def _cpu_times() -> tuple[float, float]:
    """Seconds for which this process has had a CPU, and has waited for one."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            waited = int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # a kernel without these statistics
        waited = 0.0
    return time.process_time(), waited
