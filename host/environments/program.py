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

_LAST_LINES = 20
_LONGEST_LINE = 4096  # characters of a line that are kept for an error

_UNDER_HOST = """\
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
sys.argv = sys.argv[1:]
if "/" in sys.argv[0]:
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class ProgramFailed(Exception):
    """A program could not be started, took too long, or ended with another status than 0.

    `str()` says so; `output` are the last lines that it printed; `status` is None unless it ended.
    """

    def __init__(self, message: str, output: Sequence[str] = (), status: int | None = None) -> None:
        super().__init__(message)
        self.output = list(output)
        self.status = status

    @property
    def told(self) -> str:
        """The message, and the output on lines of its own."""
        return "\n".join([f"{self}; it printed:" if self.output else str(self), *self.output])


async def run(
    command: Sequence[str | Path],
    *,
    name: str = "",
    seconds: float,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    heard: Callable[[str], None] = lambda line: None,
    inherited: Sequence[int] = (),
    limit: str = "the limit of --environment-timeout-secs",
) -> list[str]:
    """Run a program to its end; its last lines of output.

    `name` is what a failure calls it, if not by its first word.
    `heard` gets every line as it comes; `inherited` are descriptors that it keeps open; `limit`
    says what `seconds` are. Raises ProgramFailed. A program that is not awaited any longer is
    killed.
    """
    name = name or str(command[0])
    output: deque[str] = deque(maxlen=_LAST_LINES)

    def keep(line: str) -> None:
        output.append(line[:_LONGEST_LINE])
        heard(line)

    try:
        process = _start(command, variables, cwd, inherited)
    except OSError as error:
        raise ProgramFailed(f"'{name}' cannot be run: {error.strerror}") from error
    in_time = False
    try:
        in_time = await _end_of(process, keep, seconds)
    finally:
        if not in_time:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # it has ended, or has just been killed
    if not in_time:
        raise ProgramFailed(f"'{name}' was killed after {seconds:g} s, {limit}", output)
    status = process.returncode
    if status:
        raise ProgramFailed(f"'{name}' ended with status {status}", output, status)
    return list(output)


def _start(
    command: Sequence[str | Path],
    variables: Mapping[str, str] | None,
    cwd: Path | None,
    inherited: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Not as the event loop does it: uvloop forks, and gRPC's hooks can crash a forked child."""
    return subprocess.Popen(
        [*map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        cwd=cwd,
        pass_fds=inherited,
        start_new_session=True,  # a group, to be killed as one
    )


async def _end_of(
    process: subprocess.Popen[bytes], heard: Callable[[str], None], seconds: float
) -> bool:
    """Listen to a program; whether it ended, and all that could print, within that time."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(process.pid)
    transport, listener = await loop.connect_read_pipe(lambda: _Listener(heard), process.stdout)

    def end() -> None:
        loop.remove_reader(pidfd)
        ended.set_result(None)

    loop.add_reader(pidfd, end)
    try:
        _, waiting = await asyncio.wait([ended, listener.over], timeout=seconds)
        return not waiting
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        transport.close()  # should one have left the group, nobody listens to it


class _Listener(asyncio.Protocol):
    """Cuts output into lines; `over` is when nobody can print more."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard = heard
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._heard(line.decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._heard(self._rest.decode(errors="replace"))
        self.over.set_result(None)


def under_host(python: Path | str, program: Path | str, *arguments: Path | str) -> list[str]:
    """The command that runs a module, or a script by its path, as a program that ends with us.

    The kernel kills it when the thread that starts it ends. Nothing but what is installed for
    that Python can be imported.
    """
    return [str(part) for part in (python, "-I", "-c", _UNDER_HOST, program, *arguments)]
