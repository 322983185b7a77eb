"""The handler of the server's log, on the standard logger `pbhost`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TextIO

from host.logs.formats import escape_control_characters, format_json, format_text

LOGGER = logging.getLogger("pbhost")

_DEFAULT_WIDTH = 500  # columns of a table that is not written to a terminal


class LogOptions(Protocol):
    """The options that `configure` reads."""

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
    """The log of a running server. All settings but the file may change at any time.

    Records may carry in `extra`: `instance`, a Label shown before the message; `requests`, the ids
    of the requests concerned, and `trace_id`; `model` and `version` if the text names them itself;
    `source`, a `file:line` shown in place of the caller's; `table` for text that is not
    reformatted; `printed` for a line that a stub printed, which has no header.
    """

    def __init__(self, options: LogOptions) -> None:
        """Raises OSError if the log file cannot be opened."""
        super().__init__()
        self.file = options.log_file
        self._stream: TextIO | None = None
        if self.file:
            self._stream = open(self.file, "a", encoding="utf-8", errors="backslashreplace")
        self.info = options.log_info
        self.warning = options.log_warning
        self.error = options.log_error
        self.log_format = options.log_format
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

    @property
    def verbose_level(self) -> int:
        """The verbose level up to which records are written."""
        return self._verbose_level

    @verbose_level.setter
    def verbose_level(self, level: int) -> None:
        self._verbose_level = level
        _set_level()

    def close(self) -> None:
        """Restores the logger and closes the file. A second call does nothing."""
        if self in LOGGER.handlers:
            LOGGER.removeHandler(self)
            if _open_handlers():
                _set_level()
            else:
                level, LOGGER.propagate = self._previous_state
                LOGGER.setLevel(level)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        super().close()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the settings let the record through."""
        level = record.levelno
        if hasattr(record, "printed"):
            return True
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
            text = self.format(record) + "\n"
            try:
                self._write(text, record.levelno >= logging.WARNING)
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
        return format_text(record, self.log_format, self._escape)

    def _write(self, text: str, problem: bool) -> None:
        # Looked up each time, as an embedding program may replace the standard streams.
        stream = self._stream or (sys.stderr if problem else sys.stdout)
        if stream is None:
            return  # a process without a console
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()

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


def configure(options: LogOptions) -> LogHandler:
    """Writes the records of the logger `pbhost` as the options say, until the result is closed.

    Touches no other logger. Raises OSError if the log file cannot be opened.
    """
    return LogHandler(options)


def _open_handlers() -> list[LogHandler]:
    return [handler for handler in LOGGER.handlers if isinstance(handler, LogHandler)]


def _set_level() -> None:
    """Sets the level of the logger, so that records that no handler writes are dropped early."""
    most = max(log.verbose_level for log in _open_handlers())
    LOGGER.setLevel(verbose_logging_level(most) if most > 0 else logging.INFO)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table, for a record with `extra={"table": True}`.

    It is as wide as the terminal allows, or 500 columns; long cells wrap.
    """
    cells = [
        [escape_control_characters(cell).split("\n") for cell in row] for row in [headers, *rows]
    ]
    columns = zip(*cells, strict=True)
    widths = [max(1, *(len(line) for cell in column for line in cell)) for column in columns]
    excess = sum(widths) + len(widths) * 3 + 1 - _terminal_width()
    while excess > 0 and max(widths) > 1:
        # The widest column shrinks, down to the next one at a time.
        *_, second, most = [1, *sorted(widths)]
        less = max(min(second, most - 1), most - excess)
        widths[widths.index(most)] = less
        excess -= most - less
    border = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = ["", border, *_format_row(cells[0], widths), border]
    for row in cells[1:]:
        lines += _format_row(row, widths)
    return "\n".join([*lines, border, ""])


def _format_row(cells: list[list[str]], widths: list[int]) -> list[str]:
    """One row of a table, as high as its highest cell."""
    wrapped = [
        [line[at : at + width] for line in cell for at in range(0, max(1, len(line)), width)]
        for cell, width in zip(cells, widths, strict=True)
    ]
    height = max(map(len, wrapped))
    return [
        "| "
        + " | ".join(
            (cell[index] if index < len(cell) else "").ljust(width)
            for cell, width in zip(wrapped, widths, strict=True)
        )
        + " |"
        for index in range(height)
    ]


def _terminal_width() -> int:
    try:
        return (
            os.get_terminal_size(sys.stdout.fileno()).columns or _DEFAULT_WIDTH
        )  # in a container it may be 0
    except (AttributeError, OSError, ValueError):
        return _DEFAULT_WIDTH
