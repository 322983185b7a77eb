"""The lines of development mode."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from typing import Any

from host.logs.colours import Colour, paint, shows_colours
from host.logs.development import format_dev
from host.logs.formats import Label


def record(message: str, level: int = logging.ERROR, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("pbhost", level, "file.py", 7, message, (), None)
    made.__dict__.update(extra)
    return made


def line(message: str, level: int = logging.ERROR, **extra: Any) -> str:
    """The formatted record without its time."""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", format_dev(record(message, level, **extra), False))


def test_frames_are_shown_with_their_source_the_innermost_last(tmp_path: Path) -> None:
    file = tmp_path / "model (1).py"
    file.write_text("def outer():\n    inner()\ndef inner():\n    1 / 0\n")
    text = f"ZeroDivisionError: by zero\n\nAt:\n  {file}(4): inner\n  {file}(2): outer\n"
    assert line(text, instance=Label("m", 1)) == (
        "ERROR   [m:1] ZeroDivisionError: by zero\n"
        f"    {file}:2 in outer\n"
        "      inner()\n"
        f"    {file}:4 in inner\n"
        "      1 / 0"
    )


def test_a_file_that_is_gone_and_other_lines_are_shown_as_they_are() -> None:
    text = "Error: x\n\nAt:\n  /nowhere/model.py(4): inner\n  something else\n"
    assert line(text) == "ERROR   Error: x\n  something else\n    /nowhere/model.py:4 in inner"
    assert line("plain", logging.INFO) == "INFO    plain"
    assert line("a line", logging.INFO, printed=True, instance="m_0") == "[m_0] a line"
    assert line("\n| table |\n", table=True) == "| table |"


def test_no_control_character_of_a_model_reaches_the_terminal() -> None:
    text = "Error: \x1b[31m\n\nAt:\n  /nowhere/\x1b[2J.py(4): in\x07ner\n"
    assert "\x1b" not in line(text) and "\x07" not in line(text)


def test_colours_are_used_where_the_user_wants_them() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain = {"TERM": "xterm"}
    assert shows_colours(Terminal(), plain)
    assert not shows_colours(io.StringIO(), plain)
    assert not shows_colours(None, plain)
    assert not shows_colours(Terminal(), {**plain, "NO_COLOR": "1"})
    assert shows_colours(Terminal(), {**plain, "NO_COLOR": ""})
    assert not shows_colours(Terminal(), {"TERM": "dumb"})
    assert not shows_colours(Terminal(), {})
    closed = io.StringIO()
    closed.close()
    assert not shows_colours(closed, plain)
    assert paint("x", Colour.RED) == "\x1b[31mx\x1b[0m"
    assert paint("x", Colour.RED, False) == "x"
    assert "\x1b[31m" in format_dev(record("x"), True)
