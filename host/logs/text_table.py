"""Text tables for the log, such as the one of models that is logged at start-up."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from host.logs.formats import escape_control_characters

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
