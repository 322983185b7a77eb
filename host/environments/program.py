"""Runs programs with a time limit, reads their output, and kills their process groups."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from host.system.output_reader import OutputReader

_MAX_LINES = 20
_MAX_LINE_LENGTH = 4096  # characters per line in an error message

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
    """A program could not be started, ran too long, or ended with a status other than 0.

    `output` has the last lines that it printed. `status` is its exit status, None if it did not
    end by itself.
    """

    def __init__(self, message: str, output: Sequence[str] = (), status: int | None = None) -> None:
        super().__init__(message)
        self.output = list(output)
        self.status = status

    @property
    def details(self) -> str:
        """The message, followed by the lines of output."""
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
    """Runs a program until it ends; returns its last lines of output.

    `name` is the program's name in errors (default: the first word of the command). `on_line` is
    called with every line of output. `inherited_fds` are file descriptors that the program
    inherits. `timeout_source` says in errors what sets `timeout_s`. Raises ProgramError. If the
    caller is cancelled, the program is killed.
    """
    name = name or str(command[0])
    output: deque[str] = deque(maxlen=_MAX_LINES)

    def keep(line: str, error: bool) -> None:
        for start in range(0, len(line) or 1, _MAX_LINE_LENGTH):  # the end of a long one says more
            output.append(line[start : start + _MAX_LINE_LENGTH])
        on_line(line)

    try:
        process, pipe = _start(command, variables, cwd, inherited_fds)
    except OSError as error:
        raise ProgramError(f"'{name}' cannot be run: {error.strerror}") from error
    reader = OutputReader(pipe, False, keep)
    in_time = False
    try:
        in_time = await _wait_for_exit(process, reader, timeout_s)
    finally:
        reader.close()  # a process that has left the group may still hold the other end
        if not in_time:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # returns at once: it has ended or has been killed
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
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a program in a new session; returns it with the pipe of its output. Raises OSError.

    This does not use the event loop's way to start processes: uvloop forks, and gRPC's fork
    handlers can crash the child.
    """
    pipe, output = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=cwd,
            pass_fds=inherited_fds,
            start_new_session=True,  # a process group, which can be killed together
        )
    except BaseException:  # Ctrl-C as well: nobody else knows of the pipe
        os.close(pipe)
        raise
    finally:
        os.close(output)
    return process, pipe


async def _wait_for_exit(
    process: subprocess.Popen[bytes], reader: OutputReader, seconds: float
) -> bool:
    """Waits until the program has ended and its output is closed; False after `seconds`."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(process.pid)

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


def command_dying_with_host(
    python: Path | str, program: Path | str, *arguments: Path | str
) -> list[str]:
    """A command that runs a module, or a script by its path, until this process ends.

    The kernel kills the program when the thread that has started it ends. The program can import
    only packages that are installed for its Python.
    """
    return [str(part) for part in (python, "-I", "-c", _DIE_WITH_HOST_SCRIPT, program, *arguments)]
