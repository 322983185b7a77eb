"""The handler of the server's log: formats records, and writes them without blocking."""

from __future__ import annotations

import logging
import os
import re
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TextIO

import msgspec

from host.logs.formats import Colour, format_dev, format_json, format_text, paint, shows_colours

MAX_QUEUED_BYTES = 8 << 20
"""Bytes of lines that wait for a console or disk; further lines are dropped."""

_PIPE_PAGE = 4096  # bytes that a pipe with room takes at once


class LogWriter:
    """Writes lines to a descriptor, which it does not close.

    A pipe takes most lines at once. Lines that it has no room for, and all lines for files and
    terminals, are written by a thread; their number of bytes is limited.

    Args:
        descriptor: Where to write.
        on_error: Called with the first OSError of the thread, on the thread.
        on_dropped: Called with a number of dropped lines when the others are written, on the
            thread; returns a line about that.
    """

    def __init__(
        self,
        descriptor: int,
        on_error: Callable[[OSError], None],
        on_dropped: Callable[[int], bytes],
    ) -> None:
        self._descriptor = descriptor
        self._on_error = on_error
        self._on_dropped = on_dropped
        self._always_queues = not _tells_room(descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._changed = threading.Condition()
        self._queue: deque[memoryview] = deque()
        self._queued = 0  # bytes, including those that the thread is writing
        self._dropped = 0  # lines
        self._closing = False
        self._thread: threading.Thread | None = None
        self._start_thread()

    def write(self, line: bytes) -> None:
        """Writes or queues a line, or drops it if too much is queued. Never waits.

        Raises OSError if the line cannot be written; nothing is raised for queued lines.
        """
        with self._changed:
            rest = memoryview(line)
            if not self._queued and not self._always_queues:
                rest = self._write_at_once(rest)
            if not rest:
                return
            if self._closing or self._queued + len(rest) > MAX_QUEUED_BYTES:
                self._dropped += 1
                return
            self._queue.append(rest)
            self._queued += len(rest)
            self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        """Starts the thread, unless it runs; at the limit of threads, the next line tries again."""
        if self._thread is None:
            thread = threading.Thread(target=self._write_queued, name="pbhost-log", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def close(self, seconds: float) -> bool:
        """Waits at most `seconds` until everything is written; returns whether it is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._start_thread()
        if self._thread is None:
            return not self._queued
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write_at_once(self, data: memoryview) -> memoryview:
        """Writes what the descriptor takes without waiting; returns the rest."""
        while data and self._poll.poll(0):
            data = data[os.write(self._descriptor, data[:_PIPE_PAGE]) :]
        return data

    def _write_queued(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                data = self._queue.popleft()
            self._write_all(data)
            with self._changed:
                self._queued -= len(data)
                dropped = 0
                if not self._queue:
                    dropped, self._dropped = self._dropped, 0
            if dropped:
                self._write_all(memoryview(self._on_dropped(dropped)))

    def _write_all(self, data: memoryview) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self._on_error(error)


def write_if_room(descriptor: int, line: bytes) -> None:
    """Writes a short line, unless that would wait or fail."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    with suppress(OSError):
        if poll.poll(0):
            os.write(descriptor, line)


def _tells_room(descriptor: int) -> bool:
    """Whether the kernel knows if a write would wait: not of a file or terminal."""
    return not (stat.S_ISREG(os.fstat(descriptor).st_mode) or os.isatty(descriptor))


_MAX_CHARACTERS = 4096  # of a line
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LogLines(msgspec.Struct, frozen=True):
    """Lines of the log.

    `last`: the number of the newest line of the log; the first one has number 1. `missed`: lines
    that were asked for and are no longer kept. `lines`: the others, the oldest first; one may
    contain newlines.
    """

    last: int
    missed: int
    lines: list[str]


class LogTail:
    """The newest `limit` lines of a log. One thread at a time adds lines."""

    def __init__(self, limit: int) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=limit)
        self._last = 0

    def add(self, line: str) -> None:
        """Adds a line; a long one is cut."""
        self._last += 1
        if len(line) > _MAX_CHARACTERS:
            line = f"{line[:_MAX_CHARACTERS]} ... and {len(line) - _MAX_CHARACTERS} characters"
        self._lines.append((self._last, line))

    def lines_after(self, number: int) -> LogLines:
        """The lines after the one with a number, all without colours.

        A number that the log has not reached comes from an earlier server: all lines are new then.
        """
        kept = list(self._lines)  # at once, as another thread may add lines meanwhile
        last = kept[-1][0] if kept else self._last
        after = number if number <= last else 0
        new = [_COLOURS.sub("", line) for place, line in kept if place > after]
        return LogLines(last, last - after - len(new), new)


LOGGER = logging.getLogger("pbhost")

_CONSOLE = (1, 2)  # the descriptors of stdout and stderr
_LOAD_FAILURE_SOURCE = "user_model.py:0"  # of a line of a stub, which the host tells as an error
CLEAR_LINE = "\r\x1b[K"
"""Moves the cursor of a terminal to the start of its line, and clears the line."""
_CLOSE_SECONDS = 2.0  # for the lines that a slow console or disk has not taken yet


class LogOptions(Protocol):
    """The options of a log."""

    log_verbose: int
    log_info: bool
    log_warning: bool
    log_error: bool
    log_format: str
    log_file: str


def verbose_logging_level(level: int) -> int:
    """The logging level of verbose level 1, 2, ...; `LOGGER.debug` is verbose level 1."""
    return max(1, logging.DEBUG + 1 - level)


class LogHandler(logging.Handler):
    """The log of a running server: writes the records of the logger `pbhost` until it is closed.

    All settings but the file may change at any time. No other logger is touched.

    Records may carry in `extra`: `instance`, a Label shown before the message; `requests`, the ids
    of the requests concerned, and `trace_id`; `model` and `version` if the text names them itself;
    `source`, a `file:line` shown instead of the caller's; `table` for text that is not
    reformatted; `printed` for a line that a stub printed, which has no header.
    """

    def __init__(self, options: LogOptions) -> None:
        """Raises OSError if the log file cannot be opened."""
        super().__init__()
        self.file = options.log_file
        self._writers: dict[int, LogWriter] = {}
        self._file: int | None = None
        if self.file:
            self._file = self._open_file()
        self.info = options.log_info
        self.warning = options.log_warning
        self.error = options.log_error
        self.log_format = options.log_format
        self._progress_shown = False  # a line without an end may be on the terminal
        self.dev = False  # whether lines are those of development mode, unless they are JSON
        self.tail: LogTail | None = None  # keeps the last lines
        self._verbose_level = 0
        self._error_reported = False  # that records are lost
        self._escape = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0"
        others = _open_handlers()
        self._previous_state: tuple[int, bool] = (
            others[0]._previous_state if others else (LOGGER.level, LOGGER.propagate)
        )
        LOGGER.propagate = False
        LOGGER.addHandler(self)
        self.verbose_level = options.log_verbose
        self._open_writers()

    def _open_writers(self) -> None:
        """Starts the threads of the log now: later, no more threads may be allowed."""
        if self._file is not None:
            self._writer(self._file)
            return
        for stream in (sys.stdout, sys.stderr):
            descriptor = None if stream is None else _console_descriptor(stream)
            if descriptor is not None:
                self._writer(descriptor)

    @property
    def verbose_level(self) -> int:
        """The verbose level up to which records are written."""
        return self._verbose_level

    @verbose_level.setter
    def verbose_level(self, level: int) -> None:
        self._verbose_level = level
        _set_level()

    def reopen(self) -> None:
        """Goes on in a new file if the old one was renamed, as by logrotate. Raises OSError."""
        if self._file is not None:
            new = self._open_file()
            try:
                os.dup2(new, self._file, inheritable=False)  # also for the thread that writes
            finally:
                os.close(new)
            self._error_reported = False

    def _open_file(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self.file, flags, 0o666)

    def close(self) -> None:
        """Restores the logger and closes the file. A second call does nothing."""
        if self in LOGGER.handlers:
            LOGGER.removeHandler(self)
            if _open_handlers():
                _set_level()
            else:
                level, LOGGER.propagate = self._previous_state
                LOGGER.setLevel(level)
        writers, self._writers = self._writers, {}
        written = [writer.close(_CLOSE_SECONDS) for writer in writers.values()]
        if self._file is not None:
            if all(written):  # otherwise a thread still writes to it
                os.close(self._file)
            self._file = None
        super().close()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the settings let the record through."""
        if not self._verbose_level and getattr(record, "source", "") == _LOAD_FAILURE_SOURCE:
            return False
        return hasattr(record, "printed") or self.writes_level(record.levelno)

    def writes_level(self, level: int) -> bool:
        """Whether the settings let records of a level of `logging` through."""
        if level >= logging.ERROR:
            return self.error
        if level >= logging.WARNING:
            return self.warning
        if level >= logging.INFO:
            return self.info
        return level >= verbose_logging_level(self._verbose_level) and self._verbose_level > 0

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        try:
            text = self.format(record)
            if self.tail is not None:
                self.tail.add(text)
            try:
                self._write(text + "\n", record.levelno >= logging.WARNING)
            except (
                OSError,
                ValueError,
            ) as error:  # the reader of the console has gone, or the disk is full
                self._report_error(error)
        except Exception:  # as in the standard handlers: a failing log must not fail its caller
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as one or several lines."""
        if self.log_format == "json":
            return format_json(record)
        if self.dev:
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            return format_dev(record, self._file is None and shows_colours(stream))
        text = format_text(record, self.log_format, self._escape)
        colour = _level_colour(record)
        if colour is None or self._file is not None or not shows_colours(sys.stderr):
            return text
        first, newline, rest = text.partition("\n")
        return paint(first, colour) + newline + rest

    def _write(self, text: str, problem: bool) -> None:
        if self._file is not None:
            self._writer(self._file).write(text.encode(errors="backslashreplace"))
            return
        # Looked up each time, as an embedding program may replace the standard streams.
        stream = sys.stderr if problem else sys.stdout
        if stream is None:
            return  # a process without a console
        descriptor = _console_descriptor(stream)
        if descriptor is not None:
            stream.flush()  # what others have printed comes first
            if self._progress_shown and stream.isatty():
                text = CLEAR_LINE + text
            encoding = stream.encoding or "ascii"
            self._writer(descriptor).write(text.encode(encoding, "backslashreplace"))
            return
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()

    def show_progress(self, text: str) -> None:
        """Shows a line without an end on stderr, a terminal, until the next one; "" shows none.

        It is written in order with the lines of the log, which overwrite it.
        """
        self._progress_shown = bool(text)
        descriptor = _console_descriptor(sys.stderr)
        if descriptor is not None:
            encoding = sys.stderr.encoding or "ascii"
            line = (CLEAR_LINE + text).encode(encoding, "backslashreplace")
            self._writer(descriptor).write(line)

    def _writer(self, descriptor: int) -> LogWriter:
        writer = self._writers.get(descriptor)
        if writer is None:
            # At a terminal, stdout and stderr have one thread, which keeps the order of lines.
            writer = next(
                (
                    known
                    for other, known in self._writers.items()
                    if os.isatty(descriptor) and os.path.sameopenfile(other, descriptor)
                ),
                None,
            ) or LogWriter(descriptor, self._report_error, self._format_dropped)
            self._writers[descriptor] = writer
        return writer

    def _format_dropped(self, lines: int) -> bytes:
        """Returns a line about lines that were dropped."""
        text = f"dropped {lines} log lines: the console or the disk was too slow"
        record = LOGGER.makeRecord(LOGGER.name, logging.WARNING, __file__, 0, text, (), None)
        if not self.filter(record):
            return b""
        return (self.format(record) + "\n").encode(errors="backslashreplace")

    def _report_error(self, error: Exception) -> None:
        """Warns once that records are lost, if stderr still works."""
        if self._error_reported or sys.stderr is None:
            return
        self._error_reported = True
        where = f"to '{self.file}'" if self.file else "to the console"
        reason = getattr(error, "strerror", None) or error
        with suppress(OSError, ValueError):
            sys.stderr.write(f"warning: the log cannot be written {where}: {reason}\n")
            sys.stderr.flush()


def is_level_written(level: int) -> bool:
    """Whether any handler of the logger `pbhost` writes records of a level of `logging`."""
    return LOGGER.isEnabledFor(level) and (
        not LOGGER.handlers
        or any(
            not isinstance(handler, LogHandler) or handler.writes_level(level)
            for handler in LOGGER.handlers
        )
    )


def _level_colour(record: logging.LogRecord) -> Colour | None:
    """The colour of a record at a terminal; None for what is no problem of the server."""
    if record.levelno < logging.WARNING or hasattr(record, "printed"):
        return None
    return Colour.RED if record.levelno >= logging.ERROR else Colour.YELLOW


def _console_descriptor(stream: TextIO) -> int | None:
    """The descriptor of stdout or stderr, None for a stream that replaces them."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # it is in memory, or closed
        return None
    return descriptor if descriptor in _CONSOLE else None


def _open_handlers() -> list[LogHandler]:
    return [handler for handler in LOGGER.handlers if isinstance(handler, LogHandler)]


def _set_level() -> None:
    """Sets the level of the logger, so that records that no handler writes are dropped early."""
    most = max(log.verbose_level for log in _open_handlers())
    LOGGER.setLevel(verbose_logging_level(most) if most > 0 else logging.INFO)
