"""Launchers of stubs: new interpreters, forks of a server, the terminal, and bound functions."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from host.environments.environment import Environment
from host.errors import internal
from host.instances.fork_client import ForkClient
from host.instances.stub_process import StubLaunch, StubProcess, describe_exit, stub_command
from host.system.output_reader import OutputHandler, OutputReader
from stub.wire.spawn import SpawnArguments

_SILENCE_TIMEOUT = 5.0  # seconds in which a fork server has to answer

_log = logging.getLogger("pbhost")


class InterpreterSpawner:
    """Starts Python processes from one thread that lives as long as they do.

    The kernel kills them when the thread that started them ends.
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
        """Starts a stub or a fork server. Raises OSError."""
        variables = None if environment is None else environment.variables(os.environ)
        command = [*stub_command(environment), *arguments]
        return await self._popen(command, inherited, stdout, stderr, variables)

    async def _popen(
        self,
        command: Sequence[str],
        inherited: Sequence[int],
        stdout: int,
        stderr: int | None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        def popen() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=inherited,
            )

        return await asyncio.get_running_loop().run_in_executor(self._thread, popen)

    async def launch(
        self, command: Sequence[str], inherited: Sequence[int], on_exit: Callable[[int], None]
    ) -> ChildProcess:
        """Starts a process that prints to stderr only. Raises OSError."""
        child = await self._popen(command, inherited, subprocess.DEVNULL, None)
        return ChildProcess(child, on_exit)

    def close(self) -> None:
        """Ends the thread, and so the processes."""
        self._thread.shutdown()


class ChildProcess:
    """A running process. `on_exit` is called in the event loop with its return code.

    Raises OSError; then the process is killed, as it cannot be watched.
    """

    def __init__(self, popen: subprocess.Popen[bytes], on_exit: Callable[[int], None]) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._on_exit = on_exit
        self._pidfd = _open_pidfd(popen)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._on_exit(self._popen.wait())

    def kill(self) -> None:
        """Kills the process, if it still runs."""
        self._popen.kill()


class SpawnLauncher:
    """Starts each stub as an interpreter of its own."""

    def __init__(self) -> None:
        self._interpreters = InterpreterSpawner()

    async def launch(self, stub: StubLaunch) -> StubProcess:
        """As `Launcher.launch`."""
        out, err = _output_pipes()
        try:
            child = await self._interpreters.start(
                [stub.spawn.dump()], stub.spawn.descriptors, out[1], err[1], stub.environment
            )
            pidfd = _open_pidfd(child)
        except BaseException:  # also if cancelled, as the descriptors have no other owner
            _close_descriptors(out[0], err[0])
            raise
        finally:
            _close_descriptors(out[1], err[1])
        process = StubProcess(child.pid, pidfd, stub, (out[0], err[0]))
        process.reap_on_exit(child.wait)
        return process

    async def close(self) -> None:
        """As `Launcher.close`."""
        self._interpreters.close()


@dataclass(frozen=True, slots=True)
class Preload:
    """A model that a fork server prepares before it forks into instances.

    Attributes:
        model: The name of the model, for errors.
        job: The JSON of a `PreloadJob`.
        output: Called with what the model prints meanwhile.
        on_started: Called with the process id.
        seconds: The most that it may take; None for no limit.
        environment: The Python of the model; None for the host's own.
    """

    model: str
    job: bytes
    output: OutputHandler
    on_started: Callable[[int], None]
    seconds: float | None = None
    environment: Environment | None = None


class ForkLauncher:
    """Forks stubs from one server process, which starts with the first stub.

    If the server dies, its stubs die with it and the next launch starts another one; launches that
    it has not answered are spawned. If it is silent for `silence_timeout` seconds, its stubs
    continue, and the next launch starts another one as well. The Python of an environment is
    another program, so its stubs are spawned. With `preload`, the server has prepared a model, and
    has its Python.
    """

    def __init__(
        self, silence_timeout: float = _SILENCE_TIMEOUT, preload: Preload | None = None
    ) -> None:
        self._preload = preload
        self._silence_timeout = silence_timeout
        self._spawn = SpawnLauncher()
        self._interpreters = InterpreterSpawner()
        self._server: ForkServer | None = None
        self._silent_servers: list[ForkServer] = []
        self._starting = asyncio.Lock()

    async def launch(self, stub: StubLaunch) -> StubProcess:
        """As `Launcher.launch`. Raises TimeoutError for the launch that finds the server silent."""
        if stub.environment is not None and self._preload is None:
            return await self._spawn.launch(stub)
        server = await self.prepare()
        try:
            return await server.fork(stub)
        except ConnectionError as error:
            _log.warning("%s: a stub is started as a new interpreter, not forked", error)
        return await self._spawn.launch(stub)

    async def prepare(self) -> ForkServer:
        """Starts the server if none runs. Raises OSError; HostError if the preload fails."""
        async with self._starting:
            if self._server is not None and self._server.silent:
                self._silent_servers.append(self._server)
                self._server = None
            if self._server is None or not self._server.alive:
                self._server = await ForkServer.start(
                    self._interpreters, self._silence_timeout, self._preload
                )
            return self._server

    async def close(self) -> None:
        """As `Launcher.close`."""
        for server in (*self._silent_servers, self._server):
            if server is not None:
                await server.close()
        self._interpreters.close()
        await self._spawn.close()


class ForkServer:
    """A fork server, and the stubs that it has started."""

    def __init__(
        self, popen: subprocess.Popen[bytes], sock: socket.socket, silence_timeout: float
    ) -> None:
        self._popen = popen
        self._outputs: list[OutputReader] = []  # of a model that is prepared
        self._client = ForkClient(sock, "the fork server has ended", self._died, silence_timeout)

    @classmethod
    async def start(
        cls,
        interpreters: InterpreterSpawner,
        silence_timeout: float,
        preload: Preload | None = None,
    ) -> ForkServer:
        """Starts a server, which prepares a model first. Raises OSError or HostError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes: list[int] = []
        try:
            if preload is None:
                arguments = ["--fork-server", str(theirs.fileno())]
                popen = await interpreters.start(
                    arguments, [theirs.fileno()], subprocess.DEVNULL, None
                )
            else:
                popen, pipes = await _start_preload(interpreters, preload, theirs)
        except BaseException:  # also if cancelled, as the process has no other owner
            ours.close()
            raise
        finally:
            theirs.close()
        server = cls(popen, ours, silence_timeout)
        if preload is not None:
            server._outputs = [
                OutputReader(pipe, bool(error), preload.output) for error, pipe in enumerate(pipes)
            ]
            preload.on_started(popen.pid)
            await server._wait_prepared(preload)
        return server

    async def _wait_prepared(self, preload: Preload) -> None:
        """Waits until the model is prepared. Raises HostError; then the server has ended."""
        text = f"failed to prepare model '{preload.model}': "
        try:
            error = await self._client.wait_prepared(preload.seconds)
            text += error
        except TimeoutError:
            error = f"preload did not end within {preload.seconds:g} s"
            text += f"{error} (--stub-load-timeout-secs)"
        except ConnectionError:
            error = "its process ended in preload"
            text += f"{error}: {describe_exit(self._popen.returncode)}"
        except asyncio.CancelledError:
            await self.close()
            raise
        if error:
            await self.close()
            raise internal(text)

    @property
    def alive(self) -> bool:
        return not self._client.closed

    @property
    def silent(self) -> bool:
        return self.alive and self._client.silent

    async def fork(self, stub: StubLaunch) -> StubProcess:
        out, err = _output_pipes()
        try:
            started = await self._client.start_stub(stub.spawn, out[1], err[1])
        except BaseException:  # also if cancelled, as the descriptors have no other owner
            _close_descriptors(out[0], err[0])
            raise
        finally:
            _close_descriptors(out[1], err[1])
        process = StubProcess(started.pid, started.pidfd, stub, (out[0], err[0]))
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(started.pidfd)
            self._client.expect_exit(started.pid)

        def ended(code: asyncio.Future[int]) -> None:
            loop.remove_reader(started.pidfd)
            if not self.alive:
                process.kill()  # the kernel has done that already, if the process asked for it
            process.mark_exited(code.result())

        loop.add_reader(started.pidfd, gone)
        started.code.add_done_callback(ended)
        return process

    def _died(self) -> None:
        self._popen.kill()
        self._popen.wait()

    async def close(self) -> None:
        """Ends the server, which may stand still, after its stubs."""
        if self.alive:
            self._client.close()
            await asyncio.to_thread(self._died)
        for output in self._outputs:
            while output.read():
                pass
            output.close()


async def _start_preload(
    interpreters: InterpreterSpawner, preload: Preload, sock: socket.socket
) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Starts a fork server that prepares a model; returns it with its output. Raises OSError."""
    out, err = _output_pipes()
    job = os.memfd_create("pbhost-preload")
    try:
        os.write(job, preload.job)
        os.lseek(job, 0, os.SEEK_SET)
        popen = await interpreters.start(
            ["--fork-server", str(sock.fileno()), str(job)],
            [sock.fileno(), job],
            out[1],
            err[1],
            preload.environment,
        )
    except BaseException:  # also if cancelled, as the descriptors have no other owner
        _close_descriptors(out[0], err[0])
        raise
    finally:
        _close_descriptors(job, out[1], err[1])
    return popen, [out[0], err[0]]


def _open_pidfd(child: subprocess.Popen[bytes]) -> int:
    """A pidfd of the child. Raises OSError; then the child is killed, as it cannot be watched."""
    try:
        return os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.wait()
        raise


def _output_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Pipes for stdout and stderr, reading ends first. Raises OSError."""
    first = os.pipe2(os.O_CLOEXEC)
    try:
        return first, os.pipe2(os.O_CLOEXEC)
    except OSError:
        _close_descriptors(*first)
        raise


def _close_descriptors(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class TerminalLauncher:
    """Starts stubs with the standard streams of the host, each as a new interpreter."""

    async def launch(self, stub: StubLaunch) -> StubProcess:
        """As `Launcher.launch`; output of the stub goes to the terminal."""
        modes = _terminal_modes()
        pid = _spawn_stub(stub.spawn, stub.environment)
        pidfd = _open_child_pidfd(pid)
        process = StubProcess(pid, pidfd, stub)

        def wait() -> int:
            _, status = os.waitpid(pid, 0)
            _restore_terminal(modes)
            return os.waitstatus_to_exitcode(status)

        process.reap_on_exit(wait)
        return process

    async def close(self) -> None:
        """As `Launcher.close`."""


def _spawn_stub(spawn: SpawnArguments, environment: Environment | None) -> int:
    """Starts a stub; returns its pid. Raises OSError."""
    program = stub_command(environment)
    return os.posix_spawn(
        program[0],
        [*program, spawn.dump()],
        os.environ if environment is None else environment.variables(os.environ),
        # Onto itself: that lets the child inherit it.
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, fd) for fd in spawn.descriptors],
        setsid=True,  # Ctrl-C at the terminal is for the host alone
    )


def _open_child_pidfd(pid: int) -> int:
    """A pidfd of a child. Raises OSError; then the child is killed, as it cannot be watched."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def has_terminal() -> bool:
    """Whether stdin and stdout are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def _terminal_modes() -> list[Any] | None:
    """The modes of the terminal, if there is one."""
    return termios.tcgetattr(0) if has_terminal() else None


def _restore_terminal(modes: list[Any] | None) -> None:
    """Restores the terminal after a debugger was killed at its prompt, when echo is off."""
    if modes is None:
        return
    try:
        if _in_foreground():
            termios.tcsetattr(0, termios.TCSANOW, modes)
    except termios.error:
        pass  # the terminal was closed


def _in_foreground() -> bool:
    """Whether this process group may change the terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # not the controlling terminal: there is no job control


_GONE = "the process with the bound functions has ended"


class _BoundThread(StubProcess):
    """A stub that is a thread of the caller's process. It cannot be killed, only abandoned."""

    leads_process_group = False

    def kill(self) -> None:
        """Closes its lifeline, so that it ends when its function returns; `on_exit` follows."""
        if self.running:
            asyncio.get_running_loop().call_soon(self.ended, -signal.SIGKILL)

    def ended(self, code: int) -> None:
        """Called when it has ended or was abandoned; only the first time counts."""
        if self.running:
            super().mark_exited(code)


class BoundProcessLauncher:
    """Asks the caller for stubs over a socket, like a fork server.

    Source: docs/explanation/decisions/0016.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._client = ForkClient(sock, _GONE, lambda: None)

    async def launch(self, stub: StubLaunch) -> StubProcess:
        """As `Launcher.launch`; the caller's Python is the only one."""
        if stub.environment is not None:
            raise OSError("a bound function runs in the process that has bound it")
        streams = sys.stdout.fileno(), sys.stderr.fileno()
        started = await self._client.start_stub(stub.spawn, *streams)
        thread = _BoundThread(os.getppid(), started.pidfd, stub)
        started.code.add_done_callback(lambda code: thread.ended(code.result()))
        return thread

    async def close(self) -> None:
        """As `Launcher.close`."""
        self._client.close()
