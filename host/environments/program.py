"""Programs that prepare environments: bounded in time, heard, ended with all that they start."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
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
        transport, listener = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Listener(keep),
            *map(str, command),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=variables,
            cwd=cwd,
            pass_fds=inherited,
            start_new_session=True,  # a group, to be killed as one
        )
    except OSError as error:
        raise ProgramFailed(f"'{name}' cannot be run: {error.strerror}") from error
    try:
        await asyncio.wait([listener.over], timeout=seconds)
        in_time = listener.over.done()
    finally:
        if not listener.over.done():
            with suppress(ProcessLookupError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
        transport.close()  # should one have left the group, nobody listens to it
        await listener.over
    if not in_time:
        raise ProgramFailed(f"'{name}' was killed after {seconds:g} s, {limit}", output)
    status = transport.get_returncode()
    if status:
        raise ProgramFailed(f"'{name}' ended with status {status}", output, status)
    return list(output)


class _Listener(asyncio.SubprocessProtocol):
    """Cuts output into lines; `over` is when the program has ended and nobody can print more."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard = heard
        self._rest = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
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
