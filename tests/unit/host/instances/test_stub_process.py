"""The operating-system process of a stub: its output, its end, and when the next one starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.instances.stub_process import StubLaunch, StubProcess, describe_exit
from host.system.output_reader import OutputReader
from stub.wire.spawn import SpawnArguments
from tests.conftest import DEADLINE

LONGEST = 1 << 16
CHUNK = 2048
"""Bytes of output that may be handled in one turn of the loop."""


class OutputLog:
    """Lines as the log would get them."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []
        self._changed = asyncio.Event()

    def __call__(self, line: str, error: bool) -> None:
        self.lines.append((line, error))
        self._changed.set()

    @property
    def text(self) -> list[str]:
        return [line for line, _ in self.lines]

    async def until(self, count: int) -> list[str]:
        while len(self.lines) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), DEADLINE)
        return self.text


class Pipe:
    """The stub's end of its stdout, and what the host makes of it."""

    def __init__(self) -> None:
        read, self.write_fd = os.pipe()
        self.printed = OutputLog()
        self.output = OutputReader(read, False, self.printed)
        self.read_fd = read

    def say(self, data: bytes) -> None:
        os.write(self.write_fd, data)

    def hear(self) -> None:
        """Has all that was said handled."""
        while self.output.read():
            pass

    def hang_up(self) -> None:
        os.close(self.write_fd)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_line_that_comes_in_pieces_is_one_line() -> None:
    async def main() -> None:
        pipe = Pipe()
        for piece in (b"Hel", b"lo\nwor", b"ld"):
            pipe.say(piece)
            pipe.hear()
        assert pipe.printed.text == ["Hello"]
        pipe.say(b"\n\nlast")
        assert await pipe.printed.until(3) == ["Hello", "world", ""]
        pipe.hang_up()
        assert (await pipe.printed.until(4))[-1] == "last"
        assert not is_open(pipe.read_fd)

    in_loop(main)


pieces = st.lists(st.binary(max_size=12) | st.sampled_from([b"\n", "ä\n".encode(), b"\xff"]))


@given(pieces)
@settings(max_examples=60, deadline=None)
def test_no_byte_is_lost_however_reads_are_split(data: list[bytes]) -> None:
    async def main() -> None:
        pipe = Pipe()
        for piece in data:
            if piece:
                pipe.say(piece)
                pipe.hear()
        pipe.hang_up()
        pipe.hear()
        whole = b"".join(data)
        expected = whole.removesuffix(b"\n").split(b"\n") if whole else []
        assert pipe.printed.text == [line.decode(errors="replace") for line in expected]

    in_loop(main)


def test_bytes_that_are_no_text_are_replaced_and_nothing_else_is() -> None:
    async def main() -> None:
        pipe = Pipe()
        pipe.say(b"caf\xe9 \xff\xfe\n")
        pipe.say("größe 🎈\n".encode())
        assert await pipe.printed.until(2) == ["caf\ufffd \ufffd\ufffd", "größe 🎈"]
        pipe.hang_up()
        pipe.hear()

    in_loop(main)


def test_a_character_split_between_reads_stays_whole() -> None:
    async def main() -> None:
        pipe = Pipe()
        for byte in "🎈\n".encode():
            pipe.say(bytes([byte]))
            pipe.hear()
        assert pipe.printed.text == ["🎈"]
        pipe.hang_up()
        pipe.hear()

    in_loop(main)


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    async def main() -> None:
        pipe = Pipe()
        for _ in range(10):
            pipe.say(b"x" * 40_000)
            pipe.hear()
        assert pipe.printed.lines
        assert len(pipe.output._partial_line) <= LONGEST
        pipe.say(b"end\n")
        pipe.hang_up()
        pipe.hear()
        assert "".join(pipe.printed.text) == "x" * 400_000 + "end"

    in_loop(main)


def test_a_long_line_that_ends_is_one_line() -> None:
    async def main() -> None:
        pipe = Pipe()
        pipe.say(b"y" * 60_000)
        pipe.hear()
        pipe.say(b"z" * 5_000 + b"\n")
        assert await pipe.printed.until(1) == ["y" * 60_000 + "z" * 5_000]
        pipe.hang_up()
        pipe.hear()

    in_loop(main)


def test_one_turn_handles_no_more_than_a_few_lines() -> None:
    async def main() -> None:
        pipe = Pipe()
        pipe.say(b"\n" * 60_000)
        assert pipe.output.read()
        assert len(pipe.printed.lines) == CHUNK
        pipe.output.close()
        pipe.hang_up()

    in_loop(main)


def test_close_handles_the_unterminated_line_while_others_hold_the_pipe() -> None:
    async def main() -> None:
        pipe = Pipe()
        pipe.say(b"one\nno newline")
        pipe.hear()
        assert pipe.printed.text == ["one"]
        pipe.output.close()  # the other end is still open
        pipe.output.close()
        assert pipe.printed.text == ["one", "no newline"]
        assert not is_open(pipe.read_fd)
        with pytest.raises(BrokenPipeError):
            pipe.say(b"too late")
        pipe.hang_up()

    in_loop(main)


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
