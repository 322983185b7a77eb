"""Programs that prepare environments: bounded in time, heard, ended with all that they start."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
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
    seconds: float,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    heard: Callable[[str], None] = lambda line: None,
    inherited: Sequence[int] = (),
) -> list[str]:
    """Run a program to its end; its last lines of output.

    `heard` gets every line as it comes; `inherited` are descriptors that it keeps open. Raises
    ProgramFailed. A program that is not awaited any longer is killed.
    """
    name = _name(command)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
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
    output: deque[str] = deque(maxlen=_LAST_LINES)

    def keep(line: str) -> None:
        output.append(line[:_LONGEST_LINE])
        heard(line)

    try:
        await asyncio.wait_for(_follow(process, keep), seconds)
    except asyncio.TimeoutError:
        raise ProgramFailed(
            f"'{name}' was killed after {seconds:g} s, the limit of --environment-timeout-secs",
            output,
        ) from None
    finally:
        await _end(process)
    if process.returncode:
        status = process.returncode
        raise ProgramFailed(f"'{name}' ended with status {status}", output, status)
    return list(output)


def under_host(python: Path | str, program: Path | str, *arguments: Path | str) -> list[str]:
    """The command that runs a module, or a script by its path, as a program that ends with us.

    The kernel kills it when the thread that starts it ends. Nothing but what is installed for
    that Python can be imported.
    """
    return [str(part) for part in (python, "-I", "-c", _UNDER_HOST, program, *arguments)]


def _name(command: Sequence[str | Path]) -> str:
    """Without the way in which it is run under the host."""
    parts = [str(part) for part in command if part not in ("-I", "-c", _UNDER_HOST)]
    return " ".join(parts[:3])


async def _follow(process: Process, heard: Callable[[str], None]) -> None:
    assert process.stdout is not None
    rest = b""
    while data := await process.stdout.read(4096):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            heard(line.decode(errors="replace"))
    if rest:
        heard(rest.decode(errors="replace"))
    await process.wait()


async def _end(process: Process) -> None:
    assert process.stdout is not None
    if process.returncode is None or not process.stdout.at_eof():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
