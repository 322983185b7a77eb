"""The operating-system process of a stub: its output, its end, and when the next one starts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import stub.wire
from host.environments.environment import Environment
from host.errors import ErrorCode, HostError
from host.system.output_reader import OutputHandler, OutputReader
from stub.wire.spawn import SpawnArguments

_ENTRY = str(Path(stub.wire.__file__).parents[1] / "__main__.py")

_READS_AFTER_EXIT = 48  # reads after the end: what a pipe holds (64 kB), and half as much again


@dataclass(frozen=True, slots=True)
class StubLaunch:
    """A stub that is to be started.

    `lifeline`: the end of a pipe that stays open as long as the stub may live. `on_exit` is called
    once, with the return code as in `subprocess`. `environment`: None for the host's own Python.
    """

    spawn: SpawnArguments
    lifeline: int
    output: OutputHandler
    on_exit: Callable[[int], None]
    environment: Environment | None = None


class StubProcess:
    """A running stub.

    `outputs`: reading ends of stdout and stderr. `pidfd`: for signals. Its launcher calls
    `mark_exited`.
    """

    leads_process_group = True  # of the processes that its model starts

    def __init__(
        self, pid: int, pidfd: int, stub: StubLaunch, outputs: tuple[int, ...] = ()
    ) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._lifeline = stub.lifeline
        self._on_exit = stub.on_exit
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._outputs = [
            OutputReader(fd, bool(error), stub.output) for error, fd in enumerate(outputs)
        ]

    def reap_on_exit(self, wait: Callable[[], int]) -> None:
        """Calls `wait` for the return code as soon as the pidfd says that the process has ended."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._pidfd)
            self.mark_exited(wait())

        loop.add_reader(self._pidfd, ended)

    def mark_exited(self, code: int) -> None:
        """Called when the process has ended; `on_exit` follows once its output has been read."""
        self._read_remaining_output(code, _READS_AFTER_EXIT)

    def _read_remaining_output(self, code: int, chunks: int) -> None:
        """Reads the remaining output in small parts, so that the event loop continues.

        A child of the model may keep a pipe open and write to it, so only what a pipe holds is
        read.
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
        """Whether `on_exit` was not called yet."""
        return not self._exited.done()

    def kill(self) -> None:
        """Kills the process; `on_exit` follows."""
        if self.running:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended, which is about to be reported

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits for the end; returns False after `seconds`."""
        done, _ = await asyncio.wait([self._exited], timeout=seconds)
        return bool(done)


class Launcher(Protocol):
    """Starts stubs."""

    async def launch(self, stub: StubLaunch) -> StubProcess:
        """Starts a stub.

        Raises OSError. After an error or a cancellation, the lifeline is still open.
        """

    async def close(self) -> None:
        """Frees everything else, after all stubs have ended."""


def stub_command(environment: Environment | None) -> list[str]:
    """The command that starts a stub, in an environment or on the host's Python."""
    return [sys.executable, _ENTRY] if environment is None else environment.stub


class StubLost(HostError):
    """A stub was killed by a signal, or did not start; another one may work."""


def stub_lost(message: str, code: ErrorCode = ErrorCode.INTERNAL) -> StubLost:
    """The error of a stub that may be tried again."""
    return StubLost(code, message)


NO_MORE_PROCESSES = (
    "no more processes or threads are allowed; raise the limit of the user (ulimit -u) or of the"
    " container (pids)"
)
"""What to do about EAGAIN."""


def describe_exit(code: int, why: str = "") -> str:
    """A return code in words. `why`: what is known of the reason of a SIGKILL."""
    if code >= 0:
        return f"exited with status {code}"
    return f"was ended by {name_signal(-code)}" + (f" ({why})" if why else "")


def name_signal(number: int) -> str:
    """The name of a signal, as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RestartBackoff:
    """Counts the ends of a process and its successors, and says when the next one starts.

    At once after the first end in a row; then after `first_pause` seconds, and twice as long each
    time, up to `max_pause`. An end after more than `proven_seconds` of service begins a new row.
    """

    def __init__(self, first_pause: float, max_pause: float, proven_seconds: float) -> None:
        self.exits = 0  # in a row
        self._first_pause = first_pause
        self._max_pause = max_pause
        self._proven_seconds = proven_seconds
        self.process_started()

    def process_started(self) -> None:
        """Counts the time of service from now on."""
        self._started_at = time.monotonic()

    def process_exited(self) -> None:
        """Counts an end."""
        if time.monotonic() > self._started_at + self._proven_seconds:
            self.exits = 0
        self.exits += 1

    @property
    def pause(self) -> float:
        """Seconds until the next process starts."""
        if self.exits < 2:
            return 0.0
        doublings = min(self.exits - 2, 100)  # a power of more than 1023 raises OverflowError
        return min(self._first_pause * 2.0**doublings, self._max_pause)
