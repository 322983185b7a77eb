"""Tables in the log: widths, wrapped cells, and terminals."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from host.logs.text_table import format_table


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
