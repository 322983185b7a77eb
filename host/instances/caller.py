"""Instances in the process that started this host: functions that are bound there."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable

from host.environments.environment import Environment
from host.instances.process import OutputHandler, StubProcess
from stub.wire.fork_protocol import receive_news, send_request
from stub.wire.spawn import Spawn


class _CallersThread(StubProcess):
    """A stub that is a thread of the caller's. Nobody can end it, but it is let go of."""

    def kill(self) -> None:
        """Its lifeline ends, so that it leaves when its function returns; `on_exit` follows."""
        if self.running:
            asyncio.get_running_loop().call_soon(self.ended, -signal.SIGKILL)

    def ended(self, code: int) -> None:
        """It has ended, or been let go of; only the first time counts."""
        if self.running:
            super().ended(code)


class CallerLauncher:
    """Asks the caller for stubs, over a socket, as one asks a fork server (decision 16)."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(False)
        self._starting: dict[str, tuple[Callable[[int], StubProcess], asyncio.Future[StubProcess]]]
        self._starting = {}
        self._stubs: dict[int, StubProcess] = {}
        self._reading = False
        self._gone = False

    async def launch(
        self,
        spawn: Spawn,
        lifeline: int,
        output: OutputHandler,
        on_exit: Callable[[int], None],
        environment: Environment | None = None,
    ) -> StubProcess:
        """As `Launcher.launch`; there is only the caller's Python."""
        if environment is not None or self._gone:
            raise ConnectionError("the process with the bound functions has ended")
        if not self._reading:
            asyncio.get_running_loop().add_reader(self._socket, self._read)
            self._reading = True

        def attach(pidfd: int) -> StubProcess:
            return _CallersThread(os.getppid(), pidfd, lifeline, (), output, on_exit)

        started: asyncio.Future[StubProcess] = asyncio.get_running_loop().create_future()
        self._starting[spawn.token] = (attach, started)
        try:
            send_request(self._socket, spawn, sys.stdout.fileno(), sys.stderr.fileno())
            return await started
        finally:
            self._starting.pop(spawn.token, None)

    def _read(self) -> None:
        try:
            news = receive_news(self._socket)
        except BlockingIOError:
            return
        except OSError:
            news = None
        if news is None:
            self._lost()
            return
        told, descriptors = news
        number = told["pid"]
        assert isinstance(number, int)
        if "token" not in told:
            code = told["code"]
            assert isinstance(code, int)
            self._stubs.pop(number).ended(code)
            return
        attach, started = self._starting.pop(str(told["token"]))
        stub = self._stubs[number] = attach(descriptors[0])
        started.set_result(stub)

    def _lost(self) -> None:
        """The caller is gone, and its threads with it."""
        self._stop_reading()
        starting, self._starting = self._starting, {}
        for _, started in starting.values():
            started.set_exception(ConnectionError("the process with the bound functions has ended"))
        stubs, self._stubs = self._stubs, {}
        for stub in stubs.values():
            stub.ended(-signal.SIGKILL)

    def _stop_reading(self) -> None:
        self._gone = True
        if self._reading:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._reading = False

    async def close(self) -> None:
        """As `Launcher.close`."""
        self._stop_reading()
        self._socket.close()
