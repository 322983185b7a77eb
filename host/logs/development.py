"""Log lines of development mode: short, coloured, with the source lines of errors."""

from __future__ import annotations

import linecache
import logging
import re
import time

from host.logs.colours import Colour, paint
from host.logs.formats import describe_record, escape_control_characters

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
