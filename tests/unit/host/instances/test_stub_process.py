"""The operating-system process of a stub: its output, its end, and when the next one starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from host.instances.stub_process import StubLaunch, StubProcess, describe_exit
from stub.wire.spawn import SpawnArguments
from tests.conftest import DEADLINE
from tests.unit.host.system.test_output_reader import CHUNK, OutputLog, in_loop, is_open


@asynccontextmanager
async def process_of(code: str) -> AsyncIterator[tuple[StubProcess, OutputLog, list[int]]]:
    """A process instead of a stub, with its handle; a launcher's part is played here."""
    lifeline_read, lifeline = os.pipe()
    out, err = os.pipe(), os.pipe()
    arguments = [sys.executable, "-c", code]
    child = subprocess.Popen(arguments, stdout=out[1], stderr=err[1])  # noqa: ASYNC220
    os.close(out[1])
    os.close(err[1])
    printed, exits = OutputLog(), list[int]()
    spawn = SpawnArguments("ipc:///nowhere", "", "", 0, 0, 0, 0, 0, 1, 0, 4096, 0, 4096)
    stub = StubLaunch(spawn, lifeline, printed, exits.append)
    process = StubProcess(child.pid, os.pidfd_open(child.pid), stub, (out[0], err[0]))
    process.reap_on_exit(child.wait)
    try:
        yield process, printed, exits
    finally:
        process.kill()
        await process.wait(DEADLINE)
        assert not is_open(lifeline)
        os.close(lifeline_read)


def test_both_streams_are_told_apart_and_the_exit_comes_last() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"

    async def main() -> None:
        async with process_of(code) as (process, printed, exits):
            assert await process.wait(DEADLINE)
            assert exits == [3]
            assert sorted(printed.lines) == [("err", True), ("out", False)]
            assert not process.running
            process.kill()  # does nothing, and affects no other process

    in_loop(main)


def test_killed_process_reports_its_signal() -> None:
    async def main() -> None:
        async with process_of("import signal; print('on', flush=True); signal.pause()") as parts:
            process, printed, exits = parts
            await printed.until(1)
            assert not await process.wait(0.01)
            process.kill()
            assert await process.wait(DEADLINE)
            assert exits == [-9]

    in_loop(main)


def test_a_forked_child_that_keeps_the_pipe_does_not_hold_up_the_exit() -> None:
    code = """
import os, signal
if os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
os.write(1, b"parent leaves\\n")
"""

    async def main() -> None:
        async with process_of(code) as (process, printed, exits):
            await printed.until(2)
            assert await process.wait(DEADLINE)
            assert exits == [0]
            assert "parent leaves" in printed.text
            child = next(int(line) for line in printed.text if line.isdigit())
            os.kill(child, 9)

    in_loop(main)


def test_buffered_output_is_handled_before_the_exit() -> None:
    code = """
import os
os.write(1, b"one\\n" * 15_000 + b"no newline")
"""

    async def main() -> None:
        async with process_of(code) as (process, printed, exits):
            assert await process.wait(DEADLINE)
            assert exits == [0]
            assert printed.text == ["one"] * 15_000 + ["no newline"]

    in_loop(main)


def test_event_loop_runs_while_the_last_lines_are_handled() -> None:
    code = "import os; os.write(1, b'\\n' * 60_000)"

    async def main() -> None:
        async with process_of(code) as (process, printed, exits):
            turns = []

            def turn() -> None:
                turns.append(len(printed.lines))
                if not exits:
                    asyncio.get_running_loop().call_soon(turn)

            turn()
            assert await process.wait(DEADLINE)
            assert len(printed.lines) == 60_000
            most = max(after - before for before, after in pairwise(turns))
            assert most <= 2 * CHUNK  # the pipe's own turn, and one at the end

    in_loop(main)


def test_grandchild_that_keeps_printing_does_not_delay_the_exit() -> None:
    code = """
import os
read, write = os.pipe()
if os.fork() == 0:
    while True:
        os.write(1, b"chatter\\n" * 4000)
        os.write(write, b"!")
os.read(read, 1)
os._exit(7)
"""

    async def main() -> None:
        async with process_of(code) as (process, printed, exits):
            assert await process.wait(DEADLINE)
            assert exits == [7]
            said = len(printed.lines)
            assert said >= 4000
            await asyncio.sleep(0)
            assert len(printed.lines) == said  # and its output goes nowhere

    in_loop(main)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was ended by SIGKILL"),
        (-11, "was ended by SIGSEGV"),
        (-40, "was ended by signal 40"),
    ],
)
def test_exit_description(code: int, text: str) -> None:
    assert describe_exit(code) == text
