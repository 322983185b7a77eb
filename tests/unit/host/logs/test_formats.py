"""The formats of log lines: colours, texts of numbers and times, tables, and development mode."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from host.logs.formats import Colour, Label, format_dev, format_table, paint, shows_colours


def test_a_table_aligns_its_columns() -> None:
    assert format_table(["Model", "Status"], [["m", "READY"], ["long name", ""]]) == (
        "\n"
        "+-----------+--------+\n"
        "| Model     | Status |\n"
        "+-----------+--------+\n"
        "| m         | READY  |\n"
        "| long name |        |\n"
        "+-----------+--------+\n"
    )


def test_a_table_may_have_no_rows() -> None:
    assert format_table(["A", ""], []) == "\n+---+---+\n| A |   |\n+---+---+\n+---+---+\n"


def test_cells_of_several_lines_stay_within_their_column() -> None:
    assert format_table(["A", "B"], [["1", "x\nyz\x1b"]]).splitlines()[4:6] == [
        "| 1 | x      |",
        "|   | yz\\x1b |",
    ]


def test_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.terminal_size((20, 10))
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: size)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 1))
    lines = format_table(["Model", "Status"], [["m", "0123456789abcdefghijkl"]]).splitlines()
    assert lines[1:] == [
        "+-------+----------+",
        "| Model | Status   |",
        "+-------+----------+",
        "| m     | 01234567 |",
        "|       | 89abcdef |",
        "|       | ghijkl   |",
        "+-------+----------+",
    ]


def test_a_terminal_without_a_size_does_not_narrow_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((0, 0)))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 1))
    assert "| Model | Status |" in format_table(["Model", "Status"], [["m", "READY"]])


def test_table_that_is_not_shown_on_a_terminal_is_at_most_500_wide() -> None:
    lines = format_table(["A", "B"], [["x" * 900, "y" * 900]]).splitlines()
    assert {len(line) for line in lines[1:]} == {500}
    assert sum(line.count("x") for line in lines) == sum(line.count("y") for line in lines) == 900


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
