"""Two ways to start a stub: a new interpreter, or a fork of one that has its imports done."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import stub.wire
from host.environments.environment import Environment
from host.instances.process import OutputHandler, StubProcess
from stub.wire.fork_protocol import receive_news, send_request
from stub.wire.spawn import Spawn

_ENTRY = str(Path(stub.wire.__file__).parents[1] / "__main__.py")

_Attach = Callable[[int, int], StubProcess]
"""Makes the handle of a stub from its pid and a pidfd."""

_MOST_AT_A_TIME = 16  # requests that a fork server has not answered; its socket holds many more
_EXIT_SECONDS = 5.0


class _Interpreters:
    """Starts Python processes from one thread that lives as long as they do.

    They ask the kernel to be killed when the thread that started them ends.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pbhost-spawner")

    async def start(
        self,
        arguments: Sequence[str],
        inherited: Sequence[int],
        stdout: int,
        stderr: int | None,
        environment: Environment | None = None,
    ) -> subprocess.Popen[bytes]:
        """Raises OSError."""
        program = [sys.executable, _ENTRY] if environment is None else environment.stub

        def popen() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*program, *arguments],
                env=None if environment is None else environment.variables(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=inherited,
                start_new_session=True,  # a Ctrl-C at the terminal is for the host alone
            )

        return await asyncio.get_running_loop().run_in_executor(self._thread, popen)

    def close(self) -> None:
        self._thread.shutdown()


class SpawnLauncher:
    """Every stub is an interpreter of its own from the start."""

    def __init__(self) -> None:
        self._interpreters = _Interpreters()

    async def launch(
        self,
        spawn: Spawn,
        lifeline: int,
        output: OutputHandler,
        on_exit: Callable[[int], None],
        environment: Environment | None = None,
    ) -> StubProcess:
        """As `Launcher.launch`."""
        out, err = _pipes()
        try:
            child = await self._interpreters.start(
                [spawn.dump()], spawn.descriptors, out[1], err[1], environment
            )
            pidfd = _open(child)
        except BaseException:  # also if cancelled: nobody else would close them
            _close(out[0], err[0])
            raise
        finally:
            _close(out[1], err[1])
        process = StubProcess(child.pid, pidfd, lifeline, (out[0], err[0]), output, on_exit)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(pidfd)
            process.ended(child.wait())  # returns at once: its descriptor says that it has ended

        loop.add_reader(pidfd, ended)
        return process

    async def close(self) -> None:
        """As `Launcher.close`."""
        self._interpreters.close()


class ForkLauncher:
    """Stubs are forks of one server process, which is started when the first one is needed.

    Should it die, its stubs die with it, and the next launch starts another one. The Python of an
    environment is another program, so stubs there are not forked but spawned.
    """

    def __init__(self) -> None:
        self._spawn = SpawnLauncher()
        self._interpreters = _Interpreters()
        self._server: _ForkServer | None = None
        self._starting = asyncio.Lock()

    async def launch(
        self,
        spawn: Spawn,
        lifeline: int,
        output: OutputHandler,
        on_exit: Callable[[int], None],
        environment: Environment | None = None,
    ) -> StubProcess:
        """As `Launcher.launch`."""
        if environment is not None:
            return await self._spawn.launch(spawn, lifeline, output, on_exit, environment)
        async with self._starting:
            if self._server is None or not self._server.alive:
                self._server = await _ForkServer.start(self._interpreters)
        return await self._server.fork(spawn, lifeline, output, on_exit)

    async def close(self) -> None:
        """As `Launcher.close`."""
        if self._server is not None:
            await self._server.close()
        self._interpreters.close()
        await self._spawn.close()


class _ForkServer:
    """The host's end of a fork server."""

    def __init__(self, popen: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.alive = True
        self._popen = popen
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._starting: dict[str, tuple[_Attach, asyncio.Future[StubProcess]]] = {}
        self._slots = asyncio.Semaphore(_MOST_AT_A_TIME)
        self._stubs: dict[int, StubProcess] = {}
        self._loop.add_reader(sock, self._read)

    @classmethod
    async def start(cls, interpreters: _Interpreters) -> _ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            fd = theirs.fileno()
            popen = await interpreters.start(
                ["--fork-server", str(fd)], [fd], subprocess.DEVNULL, None
            )
        except BaseException:  # also if cancelled: nobody else would close it
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(popen, ours)

    async def fork(
        self, spawn: Spawn, lifeline: int, output: OutputHandler, on_exit: Callable[[int], None]
    ) -> StubProcess:
        out, err = _pipes()

        def attach(pid: int, pidfd: int) -> StubProcess:
            return StubProcess(pid, pidfd, lifeline, (out[0], err[0]), output, on_exit)

        started: asyncio.Future[StubProcess] = self._loop.create_future()
        async with self._slots:
            self._starting[spawn.token] = (attach, started)
            try:
                send_request(self._socket, spawn, out[1], err[1])
                return await started
            except OSError:
                self._starting.pop(spawn.token, None)
                _close(out[0], err[0])
                raise
            finally:
                _close(out[1], err[1])

    def _read(self) -> None:
        try:
            news = receive_news(self._socket)
        except BlockingIOError:
            return
        except OSError:
            news = None
        if news is None:
            self._died()
            return
        told, descriptors = news
        pid = told["pid"]
        assert isinstance(pid, int)
        if "token" in told:
            attach, started = self._starting.pop(str(told["token"]))
            if not descriptors:  # there was no room for one more in this process
                started.set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
                return
            process = self._stubs[pid] = attach(pid, descriptors[0])
            started.set_result(process)
        else:
            code = told["code"]
            assert isinstance(code, int)
            ended = self._stubs.pop(pid, None)
            if ended is not None:
                ended.ended(code)

    def _died(self) -> None:
        """The server is gone, and the kernel has killed its stubs."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._popen.kill()
        self._popen.wait()
        starting, self._starting = self._starting, {}
        for _, started in starting.values():
            started.set_exception(ConnectionError("the fork server has ended"))
        stubs, self._stubs = self._stubs, {}
        for process in stubs.values():
            process.kill()
            process.ended(-signal.SIGKILL)

    async def close(self) -> None:
        if self.alive:
            self.alive = False
            self._loop.remove_reader(self._socket)
            self._socket.close()
            await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        try:
            self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def _open(child: subprocess.Popen[bytes]) -> int:
    """A pidfd of the child. Raises OSError; nobody could watch the child, so it is gone then."""
    try:
        return os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.wait()
        raise


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """For stdout and stderr, reading ends first. Raises OSError."""
    first = os.pipe2(os.O_CLOEXEC)
    try:
        return first, os.pipe2(os.O_CLOEXEC)
    except OSError:
        _close(*first)
        raise


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
