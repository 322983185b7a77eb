"""The handler of the server's log: formats records, and writes them without blocking."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from host.logs import log_handler as log
from host.logs.formats import Label, format_table, model_fields
from host.logs.log_handler import MAX_QUEUED_BYTES, LogTail, LogWriter, write_if_room
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


def test_lines_are_numbered_and_old_ones_are_missed() -> None:
    tail = LogTail(2)
    assert (tail.lines_after(0).last, tail.lines_after(0).lines) == (0, [])
    for line in ("one", "two", "three"):
        tail.add(line)
    found = tail.lines_after(0)
    assert (found.last, found.missed, found.lines) == (3, 1, ["two", "three"])
    assert tail.lines_after(2).lines == ["three"]
    assert tail.lines_after(3).lines == []
    assert tail.lines_after(3).missed == 0


def test_a_number_of_an_earlier_server_counts_as_none() -> None:
    tail = LogTail(2)
    tail.add("one")
    assert tail.lines_after(99).lines == ["one"]


def test_long_lines_are_cut_and_colours_are_left_out() -> None:
    tail = LogTail(2)
    tail.add("\x1b[1;31mred\x1b[0m")
    tail.add("x" * 5000)
    red, long = tail.lines_after(0).lines
    assert red == "red"
    assert long == "x" * 4096 + " ... and 904 characters"


Configure = Callable[..., log.LogHandler]
HEAD = "I0203 04:05:06.750000 42 core.py:7] "


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    monkeypatch.delenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", raising=False)
    opened: list[log.LogHandler] = []

    def make(**settings: Any) -> log.LogHandler:
        options = SimpleNamespace(
            log_verbose=0,
            log_info=True,
            log_warning=True,
            log_error=True,
            log_format="default",
            log_file="",
        )
        options.__dict__.update(settings)
        opened.append(log.LogHandler(options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def record(level: int, message: str, **extra: object) -> logging.LogRecord:
    """A record of 3 February 2021, 04:05:06.750000 UTC, from line 7 of core.py in process 42."""
    made = logging.LogRecord("pbhost", level, "/x/core.py", 7, message, (), None)
    made.created, made.process = 1612325106.75, 42
    made.__dict__.update(extra)
    return made


@pytest.mark.parametrize(
    ("level", "letter"),
    [
        (logging.ERROR, "E"),
        (logging.WARNING, "W"),
        (logging.INFO, "I"),
        (log.verbose_logging_level(2), "I"),
    ],
)
def test_lines_have_the_form_of_triton_by_default(
    configure: Configure, level: int, letter: str
) -> None:
    assert configure().format(record(level, "loading: m:1")) == (
        f'{letter}0203 04:05:06.750000 42 core.py:7] "loading: m:1"'
    )


def test_lines_have_iso_times_with_log_format_iso8601(configure: Configure) -> None:
    line = configure(log_format="ISO8601").format(record(logging.WARNING, "hot"))
    assert line == '2021-02-03T04:05:06Z W 42 core.py:7] "hot"'


def test_format_can_be_changed_while_running(configure: Configure) -> None:
    running = configure()
    running.log_format = "ISO8601"
    assert running.format(record(logging.INFO, "x")).startswith("2021-02-03T04:05:06Z I ")


def test_message_is_a_json_string(configure: Configure) -> None:
    assert configure().format(record(logging.INFO, 'a "b" \\ \t ü \x1b[31m')) == (
        HEAD + r'"a \"b\" \\ \t ü \u001b[31m"'
    )


def test_escaping_can_be_switched_off_at_start(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = configure()
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    line = record(logging.INFO, 'a "b"\nc')
    assert configure().format(line) == HEAD + 'a "b"\nc'
    assert before.format(line) != HEAD + 'a "b"\nc'


def test_lines_that_follow_stay_readable_but_cannot_pass_for_the_log(configure: Configure) -> None:
    text = configure().format(record(logging.INFO, f'failed\n  File "m.py"\n{HEAD}forged\r\x1b[2J'))
    assert text.split("\n") == [
        HEAD + '"failed"',
        '    File "m.py"',
        f"  {HEAD}forged\\r\\x1b[2J",
    ]


def test_exception_is_written_as_a_readable_traceback(configure: Configure) -> None:
    made = record(logging.ERROR, "broken")
    try:
        raise ValueError('say "why"')
    except ValueError:
        made.exc_info = sys.exc_info()
    lines = configure().format(made).split("\n")
    assert lines[0].endswith('] "broken"')
    assert lines[1] == "  Traceback (most recent call last):"
    assert lines[-1] == '  ValueError: say "why"'


def test_instance_label_stands_before_the_message(configure: Configure) -> None:
    line = configure().format(record(logging.INFO, "text", instance="m_0_0"))
    assert line == HEAD + '"[m_0_0] text"'


def test_models_own_line_shows_where_the_model_logged_it(configure: Configure) -> None:
    line = configure().format(record(logging.INFO, "x", instance="m_0_0", source="model.py:31"))
    assert line == HEAD.replace("core.py:7", "model.py:31") + '"[m_0_0] x"'


def test_printed_line_is_passed_on_without_a_header(configure: Configure) -> None:
    line = configure().format(record(logging.INFO, 'a "b"', instance="m_0_0", printed=True))
    assert line == '[m_0_0] a "b"'


def test_table_stays_as_it_is(configure: Configure) -> None:
    text = format_table(["A"], [["1"]])
    assert configure().format(record(logging.INFO, text, table=True)) == HEAD + text


def test_info_goes_to_stdout_and_problems_to_stderr(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(log_verbose=1)
    log.LOGGER.debug("detail")
    log.LOGGER.info("news")
    log.LOGGER.warning("hot")
    log.LOGGER.error("burnt")
    out, err = capsys.readouterr()
    assert [line.split("] ")[1] for line in out.splitlines()] == ['"detail"', '"news"']
    assert [line.split("] ")[1] for line in err.splitlines()] == ['"hot"', '"burnt"']


def test_line_names_its_caller(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    log.LOGGER.info("x")
    out = capsys.readouterr().out
    assert f" {os.getpid()} test_log_handler.py:" in out


@pytest.mark.parametrize("switch", ["info", "warning", "error"])
def test_each_level_has_a_switch(
    configure: Configure, capsys: pytest.CaptureFixture[str], switch: str
) -> None:
    running = configure(**{f"log_{switch}": False})
    shown = {"info", "warning", "error"} - {switch}
    write_all()
    out = "".join(capsys.readouterr())
    assert {name for name in ("info", "warning", "error") if f'"{name}"' in out} == shown
    setattr(running, switch, True)
    write_all()
    assert f'"{switch}"' in "".join(capsys.readouterr())


def write_all() -> None:
    log.LOGGER.info("info")
    log.LOGGER.warning("warning")
    log.LOGGER.error("error")


def test_prints_of_a_model_do_not_depend_on_the_switches(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(log_info=False, log_warning=False, log_error=False)
    extra = {"instance": "m", "printed": True}
    log.LOGGER.info("hello", extra=extra)
    log.LOGGER.warning("trouble", extra=extra)
    assert capsys.readouterr() == ("[m] hello\n", "[m] trouble\n")


@pytest.mark.parametrize(("level", "shown"), [(0, []), (1, [1]), (2, [1, 2]), (9, [1, 2, 3])])
def test_verbose_level_shows_what_is_not_above_it(
    configure: Configure, capsys: pytest.CaptureFixture[str], level: int, shown: list[int]
) -> None:
    configure(log_verbose=level)
    for number in (1, 2, 3):
        log.LOGGER.log(log.verbose_logging_level(number), str(number))
    out = capsys.readouterr().out
    assert [number for number in (1, 2, 3) if f'"{number}"' in out] == shown


def test_verbose_level_can_be_changed_while_running(configure: Configure) -> None:
    running = configure()
    assert not log.LOGGER.isEnabledFor(log.verbose_logging_level(1))
    running.verbose_level = 2
    assert log.LOGGER.isEnabledFor(log.verbose_logging_level(2))
    running.verbose_level = 0
    assert not log.LOGGER.isEnabledFor(log.verbose_logging_level(1))


def test_log_file_takes_everything_and_is_appended_to(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    opened = configure(log_file=str(path))
    write_all()
    opened.close()
    lines = path.read_text().splitlines()
    assert lines[0] == "before"
    assert [line.split("] ")[1] for line in lines[1:]] == ['"info"', '"warning"', '"error"']
    assert capsys.readouterr() == ("", "")


def test_reopened_log_goes_on_in_a_new_file(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "log"
    opened = configure(log_file=str(path))
    log.LOGGER.info("before")
    path.rename(tmp_path / "log.1")
    wait_until(lambda: "before" in (tmp_path / "log.1").read_text(), "the first line")
    opened.reopen()
    log.LOGGER.info("after")
    opened.close()
    assert "after" in path.read_text()
    assert "after" not in (tmp_path / "log.1").read_text()


def test_log_file_that_cannot_be_opened_is_an_error_and_leaves_nothing(
    configure: Configure, tmp_path: Path
) -> None:
    before = list(log.LOGGER.handlers)
    with pytest.raises(OSError):
        configure(log_file=str(tmp_path / "no" / "log"))
    assert log.LOGGER.handlers == before


def test_text_that_the_console_cannot_show_is_written_as_escapes(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    configure()
    log.LOGGER.info("naïve \udc80")
    console.seek(0)
    assert "na\\xefve \\udc80" in console.read()


def test_records_without_a_console_are_dropped_and_reported_nowhere(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "stdout", None)
    configure()
    log.LOGGER.info("lost")
    assert stderr.getvalue() == ""  # neither the record nor a report of a failed handler

    log.LOGGER.warning("kept")  # stderr is still there
    assert "kept" in stderr.getvalue()

    console = io.StringIO()
    monkeypatch.setattr(sys, "stdout", console)
    log.LOGGER.info("back")
    assert "back" in console.getvalue() and "lost" not in console.getvalue()


def state() -> tuple[object, ...]:
    root = logging.getLogger()
    logger = log.LOGGER
    return (root.level, root.handlers[:], logger.level, logger.propagate, logger.handlers[:])


def test_closing_leaves_the_loggers_as_they_were(configure: Configure) -> None:
    before = state()
    running = configure(log_verbose=3)
    running.close()
    running.close()
    assert state() == before


def test_closing_one_of_two_logs_leaves_the_other(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state()
    first = configure(log_verbose=1)
    second = configure()
    first.close()
    assert not log.LOGGER.isEnabledFor(log.verbose_logging_level(1))
    log.LOGGER.info("still")
    assert capsys.readouterr().out.count("still") == 1
    second.close()
    assert state() == before


def test_roots_handlers_do_not_see_the_log(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    configure()
    log.LOGGER.info("mine")
    assert caplog.records == []


def test_label_has_as_much_as_is_known(configure: Configure) -> None:
    running = configure()
    for label, shown in (
        (Label("m", 3, "m_0"), "[m:3/m_0] text"),
        (Label("m", 3), "[m:3] text"),
        (Label("m"), "[m] text"),
    ):
        assert running.format(record(logging.INFO, "text", instance=label)) == f'{HEAD}"{shown}"'


def test_requests_stand_behind_the_label(configure: Configure) -> None:
    running = configure()

    def line(*requests: str) -> str:
        extra = {"instance": Label("m", 1, "m_0"), "requests": requests}
        return running.format(record(logging.INFO, "text", **extra))

    assert line() == HEAD + '"[m:1/m_0] text"'
    assert line("a b") == HEAD + '"[m:1/m_0 a b] text"'
    assert line("a", "b", "c") == HEAD + '"[m:1/m_0 a +2] text"'
    assert "\n" not in line("a\nb\x1b")


def shown_as_json(configure: Configure, level: int, message: str, **extra: object) -> object:
    line = configure(log_format="json").format(record(level, message, **extra))
    assert "\n" not in line
    return json.loads(line)


def test_lines_are_json_with_log_format_json(configure: Configure) -> None:
    extra = {
        "instance": Label("m", 1, "m_0"),
        "requests": ["r"],
        "trace_id": "7",
        "source": "model.py:3",
    }
    assert shown_as_json(configure, logging.WARNING, "ü\n", **extra) == {
        "time": "2021-02-03T04:05:06.750000Z",
        "level": "WARNING",
        "pid": 42,
        "source": "model.py:3",
        "model": "m",
        "version": 1,
        "instance": "m_0",
        "request_id": "r",
        "trace_id": "7",
        "message": "ü",
    }


def test_json_line_of_a_text_that_names_its_model(configure: Configure) -> None:
    shown = shown_as_json(
        configure, log.verbose_logging_level(2), "loading: m:1", **model_fields("m", 1)
    )
    assert shown == {
        "time": "2021-02-03T04:05:06.750000Z",
        "level": "VERBOSE",
        "pid": 42,
        "source": "core.py:7",
        "model": "m",
        "version": 1,
        "message": "loading: m:1",
    }


def test_a_json_line_has_the_traceback_of_an_exception(configure: Configure) -> None:
    made = record(logging.ERROR, "broken")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    shown = json.loads(configure(log_format="json").format(made))
    assert shown["message"] == "broken"
    assert shown["exception"].endswith("ValueError: why")
