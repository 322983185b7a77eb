"""What an instance does now, and the Python stacks of its stub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from host.crashes.records import DescribedRequest
from host.errors import unavailable
from stub.wire import messages as m
from stub.wire.session import State

_PHASES = {
    State.CONNECTING: "start of the process",
    State.AUTO_COMPLETING: "import or auto_complete_config",
    State.INITIALIZING: "import or initialize",
    State.FINALIZING: "finalize",
}


def describe_phase(state: State, executing: bool) -> str:
    """What a stub does in a state; `executing`: whether it runs requests."""
    return _PHASES.get(state, "execute" if executing else "between requests")


class InstanceActivity(msgspec.Struct, frozen=True):
    """What one instance does.

    `phase`, `request_count` and `requests` are as in CrashRecord, of the requests that run now.
    `stacks`: lines with the Python stacks of all threads, the main thread first. `problem`: why
    there are none, "" if there are.
    """

    model: str
    version: int
    instance: str
    pid: int
    phase: str
    request_count: int
    requests: list[DescribedRequest]
    stacks: list[str]
    problem: str


_TIMEOUT = 5.0


class StackReading:
    """At most one reading is in progress, which all callers wait for. `send` sends to the stub."""

    def __init__(self, send: Callable[[m.DescribeStacks], None]) -> None:
        self._send = send
        self._number = 0
        self._reading: asyncio.Future[Sequence[str]] | None = None

    async def read(self, pid: int) -> Sequence[str]:
        """The lines that the stub sends.

        Raises HostError UNAVAILABLE if it does not answer in time, or is gone.
        """
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_future()
            self._number += 1
            self._send(m.DescribeStacks(self._number))
        reading = self._reading
        done, _ = await asyncio.wait([reading], timeout=_TIMEOUT)
        if done:
            return reading.result()
        if self._reading is reading:
            self._reading = None  # the next caller asks again
        raise unavailable(f"no answer in {_TIMEOUT:g} s: {_describe_process(pid)}")

    def handle_stacks(self, message: m.Stacks) -> None:
        """Called with the answer of the stub."""
        if message.number == self._number and self._reading is not None:
            reading, self._reading = self._reading, None
            reading.set_result(message.lines)

    def stub_exited(self) -> None:
        """Called when the stub is gone."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.set_exception(unavailable("the process has ended"))
            reading.exception()  # the caller may have stopped waiting; asyncio would log the error


def _describe_process(pid: int) -> str:
    """Why a process may not answer, as far as the kernel tells."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "the process has ended"
    state = stat.rpartition(") ")[2][:1]
    if state in ("T", "t"):
        return "the process is stopped"
    if state == "D":
        return "the process waits for the kernel (disk or device)"
    return (
        "native code holds the lock of the Python interpreter, or the machine is overloaded; a"
        " debugger such as gdb or py-spy shows native frames"
    )
