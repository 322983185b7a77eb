"""The lines that a process prints, read from a pipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.system.output_reader import OutputReader
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
