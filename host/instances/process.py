"""The operating-system process of a stub: started, watched, its output read, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import stub.wire
from stub.wire.spawn import Spawn

_ENTRY = str(Path(stub.wire.__file__).parents[1] / "__main__.py")
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
        """Read what is left, then close; a forked child of the model may keep the pipe open."""
        while self._open and self._read():
            pass
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
    """A running stub. `on_exit` is called once, with the return code as subprocess has it."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        lifeline: int,
        output: OutputHandler,
        on_exit: Callable[[int], None],
    ) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._lifeline = lifeline
        self._on_exit = on_exit
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        assert popen.stdout is not None and popen.stderr is not None
        self._outputs = [
            _Output(os.dup(popen.stdout.fileno()), False, output),
            _Output(os.dup(popen.stderr.fileno()), True, output),
        ]
        popen.stdout.close()
        popen.stderr.close()
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    @classmethod
    async def start(
        cls,
        spawn: Spawn,
        lifeline: int,
        spawner: Executor,
        output: OutputHandler,
        on_exit: Callable[[int], None],
    ) -> StubProcess:
        """Start a stub. `lifeline` is the end of a pipe to hold; the stub has the other one.

        `spawner`'s one thread must outlive the stub, which dies with it. Raises OSError.
        """

        def popen() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, _ENTRY, spawn.dump()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=spawn.descriptors,
                start_new_session=True,  # a Ctrl-C at the terminal is for the host alone
            )

        starting = asyncio.get_running_loop().run_in_executor(spawner, popen)
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # It starts all the same, and must not be forgotten.
            cls(await starting, lifeline, output, on_exit).kill()
            raise
        return cls(child, lifeline, output, on_exit)

    def _ended(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._popen.wait()  # returns at once: the descriptor says that it has ended
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
            self._popen.send_signal(signal.SIGKILL)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end; False if the time was over first."""
        done, _ = await asyncio.wait([self._exited], timeout=seconds)
        return bool(done)


def describe_exit(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"
