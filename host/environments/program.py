"""Programs that prepare environments: bounded in time, heard, ended with all that they start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_MAX_LINES = 20
_MAX_LINE_LENGTH = 4096  # characters of a line that are kept for an error

_DIE_WITH_HOST_SCRIPT = """\
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
sys.argv = sys.argv[1:]
if "/" in sys.argv[0]:
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class ProgramError(Exception):
    """A program could not be started, took too long, or ended with another status than 0.

    `str()` says so; `output` are the last lines that it printed; `status` is None unless it ended.
    """

    def __init__(self, message: str, output: Sequence[str] = (), status: int | None = None) -> None:
        super().__init__(message)
        self.output = list(output)
        self.status = status

    @property
    def details(self) -> str:
        """The message, and the output on lines of its own."""
        return "\n".join([f"{self}; it printed:" if self.output else str(self), *self.output])


async def run_program(
    command: Sequence[str | Path],
    *,
    name: str = "",
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
    inherited_fds: Sequence[int] = (),
    timeout_source: str = "the limit of --environment-timeout-secs",
) -> list[str]:
    """Run a program to its end; its last lines of output.

    `name` is what a failure calls it, if not by its first word.
    `on_line` gets every line as it comes; `inherited_fds` are descriptors that it keeps open;
    `timeout_source` says what sets `timeout_s`. Raises ProgramError. Cancelling the wait
    kills the program.
    """
    name = name or str(command[0])
    output: deque[str] = deque(maxlen=_MAX_LINES)

    def keep(line: str) -> None:
        output.append(line[:_MAX_LINE_LENGTH])
        on_line(line)

    try:
        process = _start(command, variables, cwd, inherited_fds)
    except OSError as error:
        raise ProgramError(f"'{name}' cannot be run: {error.strerror}") from error
    in_time = False
    try:
        in_time = await _wait_for_exit(process, keep, timeout_s)
    finally:
        if not in_time:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # it has ended, or has just been killed
    if not in_time:
        raise ProgramError(f"'{name}' was killed after {timeout_s:g} s, {timeout_source}", output)
    status = process.returncode
    if status:
        raise ProgramError(f"'{name}' ended with status {status}", output, status)
    return list(output)


def _start(
    command: Sequence[str | Path],
    variables: Mapping[str, str] | None,
    cwd: Path | None,
    inherited_fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Not as the event loop does it: uvloop forks, and gRPC's hooks can crash a forked child."""
    return subprocess.Popen(
        [*map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        cwd=cwd,
        pass_fds=inherited_fds,
        start_new_session=True,  # a group, to be killed as one
    )


async def _wait_for_exit(
    process: subprocess.Popen[bytes], on_line: Callable[[str], None], seconds: float
) -> bool:
    """Listen to a program; whether it ended, and all that could print, within that time."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(process.pid)
    transport, reader = await loop.connect_read_pipe(lambda: _OutputReader(on_line), process.stdout)

    def end() -> None:
        loop.remove_reader(pidfd)
        ended.set_result(None)

    loop.add_reader(pidfd, end)
    try:
        _, waiting = await asyncio.wait([ended, reader.closed], timeout=seconds)
        return not waiting
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        transport.close()  # should one have left the group, nobody listens to it


class _OutputReader(asyncio.Protocol):
    """Cuts output into lines; `closed` is when nobody can print more."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_line = on_line
        self._partial_line = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        if len(self._partial_line) > _MAX_LINE_LENGTH:
            lines, self._partial_line = [*lines, self._partial_line], b""
        for line in lines:
            self._on_line(line.decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._partial_line:
            self._on_line(self._partial_line.decode(errors="replace"))
        self.closed.set_result(None)


def command_dying_with_host(
    python: Path | str, program: Path | str, *arguments: Path | str
) -> list[str]:
    """The command that runs a module, or a script by its path, as a program that ends with us.

    The kernel kills it when the thread that starts it ends. Nothing but what is installed for
    that Python can be imported.
    """
    return [str(part) for part in (python, "-I", "-c", _DIE_WITH_HOST_SCRIPT, program, *arguments)]
