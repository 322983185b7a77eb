"""Lines for pipes, files and terminals, read or not read."""

from __future__ import annotations

import fcntl
import os
import pty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from host.logs.writer import MAX_QUEUED_BYTES, LogWriter, write_if_room
from tests.conftest import DEADLINE, wait_until

LINE = b"a" * 999 + b"\n"


class Sink:
    """Errors and numbers of dropped lines that a writer tells."""

    def __init__(self) -> None:
        self.errors: list[OSError] = []

    def write_to(self, descriptor: int) -> LogWriter:
        return LogWriter(descriptor, self.errors.append, lambda lines: b"%d dropped\n" % lines)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    end, start = os.pipe()
    fcntl.fcntl(start, fcntl.F_SETPIPE_SZ, 4096)
    yield end, start
    for descriptor in (end, start):
        os.close(descriptor)


def read_all(descriptor: int, until: Callable[[bytes], bool]) -> bytes:
    """Reads until a condition of all data holds."""
    data = b""
    while not until(data):
        data += os.read(descriptor, 1 << 16)
    return data


def test_a_pipe_with_room_has_the_line_at_once(sink: Sink, pipe: tuple[int, int]) -> None:
    end, start = pipe
    fcntl.fcntl(start, fcntl.F_SETPIPE_SZ, 1 << 16)
    writer = sink.write_to(start)
    writer.write(b"one\n")
    writer.write(b"two\n")
    os.set_blocking(end, False)
    assert os.read(end, 100) == b"one\ntwo\n"
    assert writer.close(DEADLINE)


def test_lines_for_a_full_pipe_wait_and_keep_their_order(sink: Sink, pipe: tuple[int, int]) -> None:
    end, start = pipe
    writer = sink.write_to(start)
    lines = [b"%d %s" % (number, LINE) for number in range(100)]
    for line in lines:
        writer.write(line)
    expected = b"".join(lines)
    assert read_all(end, lambda data: len(data) >= len(expected)) == expected
    assert writer.close(DEADLINE) and not sink.errors


def test_lines_beyond_the_limit_are_dropped_and_counted(sink: Sink, pipe: tuple[int, int]) -> None:
    end, start = pipe
    writer = sink.write_to(start)
    total = MAX_QUEUED_BYTES // len(LINE) + 500
    for _ in range(total):
        writer.write(LINE)
    data = read_all(end, lambda data: data.endswith(b"dropped\n"))
    written, notice = data[:-1].rsplit(b"\n", 1)
    dropped = int(notice.split()[0])
    assert 400 < dropped <= 500
    assert written.count(b"\n") + 1 == total - dropped
    writer.write(b"after\n")
    assert read_all(end, lambda data: data.endswith(b"after\n")) == b"after\n"
    assert writer.close(DEADLINE)


def test_closing_does_not_wait_for_a_pipe_that_is_not_read(
    sink: Sink, pipe: tuple[int, int]
) -> None:
    end, start = pipe
    writer = sink.write_to(start)
    for _ in range(100):
        writer.write(LINE)
    assert not writer.close(0.01)
    writer.write(LINE)  # is dropped
    assert read_all(end, lambda data: len(data) >= 100 * len(LINE)).startswith(LINE * 100)
    assert writer.close(DEADLINE)


@pytest.mark.parametrize("size", [1, 5000, 1 << 20])
def test_a_file_has_everything_when_the_writer_is_closed(
    sink: Sink, tmp_path: Path, size: int
) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    writer = sink.write_to(descriptor)
    for _ in range(3):
        writer.write(b"a" * size)
    assert writer.close(DEADLINE)
    os.close(descriptor)
    assert path.read_bytes() == b"a" * size * 3


def test_a_terminal_that_stands_still_is_not_waited_for(sink: Sink) -> None:
    controller, terminal = pty.openpty()
    try:
        writer = sink.write_to(terminal)
        for _ in range(100):
            writer.write(LINE)
        assert not writer.close(0.01)
        expected = (LINE * 100).replace(b"\n", b"\r\n")
        assert read_all(controller, lambda data: len(data) >= len(expected)) == expected
        assert writer.close(DEADLINE)
    finally:
        os.close(controller)
        os.close(terminal)


def test_a_pipe_without_a_reader_raises(sink: Sink) -> None:
    end, start = os.pipe()
    os.close(end)
    try:
        with pytest.raises(BrokenPipeError):
            sink.write_to(start).write(LINE)
    finally:
        os.close(start)


def test_errors_of_queued_lines_are_told(sink: Sink) -> None:
    end, start = os.pipe()
    writer = sink.write_to(start)
    for _ in range(1000):
        writer.write(LINE)
    os.close(end)
    wait_until(lambda: bool(sink.errors), "the error")
    assert isinstance(sink.errors[0], BrokenPipeError)
    assert writer.close(DEADLINE)
    os.close(start)


def test_a_short_line_is_written_if_there_is_room(pipe: tuple[int, int]) -> None:
    end, start = pipe
    write_if_room(start, b"one")
    assert os.read(end, 100) == b"one"
    write_if_room(start, b"a" * 4096)
    write_if_room(start, b"two")
    assert os.read(end, 10000) == b"a" * 4096
    os.set_blocking(end, False)
    with pytest.raises(BlockingIOError):
        os.read(end, 1)
