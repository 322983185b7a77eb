"""The operating-system process of a stub: started, watched, its output read, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import stub.wire
from host.environments.environment import Environment
from host.errors import ErrorCode, HostError
from stub.wire.spawn import SpawnArguments

_ENTRY = str(Path(stub.wire.__file__).parents[1] / "__main__.py")

_READ_BYTES = 2048  # bytes, and so lines at most, that are handled before the loop gets its turn
_READS_AFTER_EXIT = 48  # of output after the end: what a pipe holds (64 kB), and half as much again
_MAX_LINE = 1 << 16  # bytes of output without a newline that are kept back


class OutputHandler(Protocol):
    """Takes a line that a stub printed, and whether it went to stderr."""

    def __call__(self, line: str, error: bool) -> None: ...


class _OutputReader:
    """Lines from one pipe, as they come."""

    def __init__(self, fd: int, error: bool, handler: OutputHandler) -> None:
        self._fd = fd
        self._error = error
        self._handler = handler
        self._partial_line = b""
        self._open = True
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self.read)

    def read(self) -> bool:
        """Handle the next few lines; whether there may be more."""
        if not self._open:
            return False
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        lines = (self._partial_line + data).split(b"\n")
        self._partial_line = lines.pop()
        if len(self._partial_line) > _MAX_LINE:
            lines.append(self._partial_line)
            self._partial_line = b""
        for line in lines:
            self._handler(line.decode(errors="replace"), self._error)
        if not data:
            self.close()
        return bool(data)

    def close(self) -> None:
        """Handle the line that has no end, and read no more."""
        if not self._open:
            return
        self._open = False
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        if self._partial_line:
            self._handler(self._partial_line.decode(errors="replace"), self._error)
            self._partial_line = b""


class StubProcess:
    """A running stub. `on_exit` is called once, with the return code as subprocess has it.

    `lifeline` is the end of a pipe to hold; `outputs` are the reading ends of its stdout and
    stderr; `pidfd` is for signals. Whoever started it calls `ended`.
    """

    leads_process_group = True  # a process group, in which is what its model starts

    def __init__(
        self,
        pid: int,
        pidfd: int,
        lifeline: int,
        outputs: tuple[int, ...],
        output: OutputHandler,
        on_exit: Callable[[int], None],
    ) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._lifeline = lifeline
        self._on_exit = on_exit
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._outputs = [_OutputReader(fd, bool(error), output) for error, fd in enumerate(outputs)]

    def mark_exited(self, code: int) -> None:
        """The process has ended; `on_exit` follows when its last output has been read."""
        self._read_remaining_output(code, _READS_AFTER_EXIT)

    def _read_remaining_output(self, code: int, chunks: int) -> None:
        """Read what is left, a little at a time so that the loop goes on.

        A child of the model may keep a pipe open, and may keep writing: what a pipe holds is all.
        """
        more = [output.read() for output in self._outputs]
        if any(more) and chunks:
            asyncio.get_running_loop().call_soon(self._read_remaining_output, code, chunks - 1)
            return
        for output in self._outputs:
            output.close()
        os.close(self._pidfd)
        os.close(self._lifeline)
        self._exited.set_result(code)
        self._on_exit(code)

    @property
    def running(self) -> bool:
        """Whether `on_exit` is still to come."""
        return not self._exited.done()

    def kill(self) -> None:
        """End it now; `on_exit` follows."""
        if self.running:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended, and we are about to hear of it

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end; False if the time was over first."""
        done, _ = await asyncio.wait([self._exited], timeout=seconds)
        return bool(done)


class Launcher(Protocol):
    """Starts stubs."""

    async def launch(
        self,
        spawn: SpawnArguments,
        lifeline: int,
        output: OutputHandler,
        on_exit: Callable[[int], None],
        environment: Environment | None = None,
    ) -> StubProcess:
        """Start one, in an environment or on this Python.

        Raises OSError, and has then left `lifeline` open; so it has if it is cancelled.
        """

    async def close(self) -> None:
        """All stubs have ended; give the rest back."""


def stub_command(environment: Environment | None) -> list[str]:
    """What starts a stub in an environment, or on this Python; its argument follows."""
    return [sys.executable, _ENTRY] if environment is None else environment.stub


class StubLost(HostError):
    """A stub was ended by a signal, or never came: the next one may fare better."""


def stub_lost(message: str, code: ErrorCode = ErrorCode.INTERNAL) -> StubLost:
    """Tell of a stub that may be tried again."""
    return StubLost(code, message)


def describe_exit(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"
