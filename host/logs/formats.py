"""The formats of log lines: colours, texts of numbers and times, tables, and development mode."""

from __future__ import annotations

import enum
import json
import linecache
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO


class Colour(enum.Enum):
    """A colour or weight; the value is its parameter of the escape sequence (ECMA-48, SGR)."""

    BOLD = 1
    DIM = 2
    RED = 31
    GREEN = 32
    YELLOW = 33
    CYAN = 36


def shows_colours(stream: TextIO | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream is a terminal that shows colours, and the user has not refused them.

    Source: https://no-color.org.
    """
    if stream is None or environ.get("NO_COLOR") or environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


def paint(text: str, colour: Colour, shown: bool = True) -> str:
    """Returns the text in a colour, or the text itself if colours are not shown."""
    return f"\x1b[{colour.value}m{text}\x1b[0m" if shown and text else text


FORMATS = ("default", "ISO8601", "json")

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Label:
    """What a log line is about: an instance, a version or a model."""

    model: str
    version: int = 0
    instance: str = ""

    def __str__(self) -> str:
        model = f"{self.model}:{self.version}" if self.version else self.model
        return f"{model}/{self.instance}" if self.instance else model


def model_fields(model: str, version: int = 0) -> dict[str, object]:
    """The `extra` of a record whose text names the model, and the version, itself."""
    return {"model": model, "version": version}


def format_text(record: logging.LogRecord, log_format: str, escape: bool) -> str:
    """Formats a record as lines of text.

    Source: docs/reference/metrics.md, "Log lines".
    """
    message = record.getMessage()
    if hasattr(record, "printed"):
        return f"[{getattr(record, 'instance', '')}] {message}"
    head = _format_header(record, log_format)
    if hasattr(record, "table"):
        return head + message
    about = _request_prefix(record)
    if about:
        message = f"[{about}] {message}"
    exception = _exception(record)
    if exception:
        message += "\n" + exception
    if not escape:
        return head + message
    first, *more = message.split("\n")
    # Further lines are indented, so that no message can imitate a line of the log.
    lines = [head + json.dumps(first, ensure_ascii=False)]
    return "\n".join(lines + ["  " + escape_control_characters(line) for line in more])


def format_json(record: logging.LogRecord) -> str:
    """Formats a record as one line of JSON; unknown fields are left out."""
    moment, micros = time.gmtime(record.created), int(record.created % 1 * 1e6)
    fields: dict[str, Any] = {
        "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{micros:06}Z",
        "level": _level(record.levelno),
        "pid": record.process,
    }
    if hasattr(record, "printed"):
        fields["stream"] = "stderr" if record.levelno >= logging.WARNING else "stdout"
    else:
        fields["source"] = _source(record)
    label = _label(record)
    model = label.model or getattr(record, "model", "")
    version = label.version or getattr(record, "version", 0)
    requests = _requests(record)
    fields |= {
        key: value
        for key, value in (
            ("model", model),
            ("version", version),
            ("instance", label.instance),
            ("request_id", requests[0] if len(requests) == 1 else ""),
            ("request_ids", requests if len(requests) > 1 else ()),
            ("trace_id", getattr(record, "trace_id", "")),
        )
        if value
    }
    fields["message"] = record.getMessage().strip("\n")
    exception = _exception(record)
    if exception:
        fields["exception"] = exception
    return json.dumps(fields, separators=(",", ":"))


def describe_record(record: logging.LogRecord) -> tuple[str, str]:
    """What a record is about, an instance or a request, and its exception; "" for none."""
    return _request_prefix(record), _exception(record)


def escape_control_characters(text: str) -> str:
    """The text with control characters other than tab and newline escaped."""
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _format_header(record: logging.LogRecord, log_format: str) -> str:
    letter = _level(record.levelno)[0].replace("V", "I")
    moment = time.gmtime(record.created)
    if log_format == "ISO8601":
        start = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {letter}"
    else:
        micros = int(record.created % 1 * 1e6)
        start = f"{letter}{time.strftime('%m%d %H:%M:%S', moment)}.{micros:06}"
    return f"{start} {record.process} {_source(record)}] "


def _level(number: int) -> str:
    if number >= logging.ERROR:
        return "ERROR"
    if number >= logging.WARNING:
        return "WARNING"
    return "INFO" if number >= logging.INFO else "VERBOSE"


def _source(record: logging.LogRecord) -> str:
    source: str = getattr(record, "source", "") or f"{record.filename}:{record.lineno}"
    return source


def _label(record: logging.LogRecord) -> Label:
    label = getattr(record, "instance", "")
    return label if isinstance(label, Label) else Label(label)


def _requests(record: logging.LogRecord) -> Sequence[str]:
    requests: Sequence[str] = getattr(record, "requests", ())
    return requests


def _request_prefix(record: logging.LogRecord) -> str:
    """The prefix of a message in brackets: the instance, and the request that it is about.

    Of several requests the first one is named and the others are counted.
    """
    words = [str(_label(record))]
    requests = _requests(record)
    if requests:
        words.append(escape_control_characters(requests[0]).replace("\n", "\\n"))
        if len(requests) > 1:
            words.append(f"+{len(requests) - 1}")
    return " ".join(filter(None, words))


def _exception(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return "".join(traceback.format_exception(*record.exc_info)).rstrip()


_DEFAULT_WIDTH = 500  # columns of a table that is not written to a terminal


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


_FRAMES = "\n\nAt:\n"
_FRAME = re.compile(r"  (?P<file>.+)\((?P<line>\d+)\): (?P<name>.*)")
_COLOURS = ((logging.ERROR, Colour.RED), (logging.WARNING, Colour.YELLOW), (0, Colour.GREEN))


def format_dev(record: logging.LogRecord, colours: bool) -> str:
    """Formats a record as lines of text.

    The frames of an error, which models and clients get with the innermost first, are shown as
    Python shows a traceback: with their source lines, the innermost last.
    """
    message = record.getMessage()
    if hasattr(record, "table"):
        return message.strip("\n")
    colour = next(colour for level, colour in _COLOURS if record.levelno >= level)
    about, exception = describe_record(record)
    moment = paint(time.strftime("%H:%M:%S", time.localtime(record.created)), Colour.DIM, colours)
    if hasattr(record, "printed"):
        return f"{moment} {paint(f'[{about}]', Colour.CYAN, colours)} {message}"
    text, _, frames = message.partition(_FRAMES)
    if exception:
        text += f"\n{exception}"
    words = [
        moment,
        paint(f"{record.levelname:7}", colour, colours),
        *([paint(f"[{about}]", Colour.CYAN, colours)] if about else []),
        escape_control_characters(text),
    ]
    return "\n".join([" ".join(words), *_format_frames(frames, colours)])


def _format_frames(frames: str, colours: bool) -> list[str]:
    """Lines with the frames, the innermost last; lines of another form come first as they are."""
    linecache.checkcache()  # the user edits these files
    lines: list[str] = []
    others: list[str] = []
    for frame in reversed(frames.splitlines()):
        found = _FRAME.fullmatch(frame)
        if found is None:
            others += [escape_control_characters(frame)] if frame.strip() else []
            continue
        name = escape_control_characters(found["name"])
        place = escape_control_characters(f"{found['file']}:{found['line']}")
        source = linecache.getline(found["file"], int(found["line"])).strip()
        if source == found["name"]:  # a syntax error, which has no function
            lines.append(f"    {paint(place, Colour.CYAN, colours)}")
        else:
            lines.append(f"    {paint(place, Colour.CYAN, colours)} in {name}")
        if source:
            shown = escape_control_characters(source)
            lines.append(f"      {paint(shown, Colour.BOLD, colours)}")
    return [*others, *lines]
