"""The operating-system process of a stub: started, watched, its output read, ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Protocol

from stub.wire.spawn import Spawn

_PIPE_READS = 2  # of 64 kB: what a pipe holds, and one more
_LONGEST_LINE = 1 << 16  # bytes of output without a newline that are kept back


class OutputHandler(Protocol):
    """Takes a line that a stub printed, and whether it went to stderr."""

    def __call__(self, line: str, error: bool) -> None: ...


class _Output:
    """Lines from one pipe, as they come."""

    def __init__(self, fd: int, error: bool, handler: OutputHandler) -> None:
        self._fd = fd
        self._error = error
        self._handler = handler
        self._rest = b""
        self._open = True
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if not data or len(self._rest) > _LONGEST_LINE:
            if self._rest:
                lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._handler(line.decode(errors="replace"), self._error)
        if not data:
            self._close()
        return bool(data)

    def finish(self) -> None:
        """Read what is left, then close.

        A child of the model may keep the pipe open, and may keep writing: a pipe's content is all.
        """
        for _ in range(_PIPE_READS):
            if not self._open or not self._read():
                break
        if self._rest:
            self._handler(self._rest.decode(errors="replace"), self._error)
            self._rest = b""
        if self._open:
            self._close()

    def _close(self) -> None:
        self._open = False
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


class StubProcess:
    """A running stub. `on_exit` is called once, with the return code as subprocess has it.

    `lifeline` is the end of a pipe to hold; `outputs` are the reading ends of its stdout and
    stderr; `pidfd` is for signals. Whoever started it calls `ended`.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        lifeline: int,
        outputs: tuple[int, int],
        output: OutputHandler,
        on_exit: Callable[[int], None],
    ) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._lifeline = lifeline
        self._on_exit = on_exit
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._outputs = [_Output(fd, bool(error), output) for error, fd in enumerate(outputs)]

    def ended(self, code: int) -> None:
        """The process has ended."""
        os.close(self._pidfd)
        for output in self._outputs:
            output.finish()
        os.close(self._lifeline)
        self._exited.set_result(code)
        self._on_exit(code)

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
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
        self, spawn: Spawn, lifeline: int, output: OutputHandler, on_exit: Callable[[int], None]
    ) -> StubProcess:
        """Start one. Raises OSError, and has then left `lifeline` open."""

    async def close(self) -> None:
        """All stubs have ended; give the rest back."""


def describe_exit(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"
