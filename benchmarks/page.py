"""The tables of docs/explanation/performance.md: what was measured is read from them and written into them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "performance.md"


def line(cells: Sequence[str]) -> str:
    """A row as Markdown."""
    return f"| {' | '.join(cells)} |"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def tables(text: str) -> list[list[list[str]]]:
    """All tables of a page: rows of cells, of which the first are the headings."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    every = [[_cells(row) for row in table.splitlines()] for table in found]
    return [[head, *rows] for head, _, *rows in every]


def with_row(text: str, headings: Sequence[str], cells: Sequence[str]) -> str:
    """The page with this row in the table that has these headings.

    It takes the place of the row that begins alike, or comes last. Raises ValueError if the page
    has no such table.
    """
    head, separator, rest = text.partition(f"{line(headings)}\n")
    if not separator:
        raise ValueError(f"{PAGE.name} has no table with the headings {line(headings)}")
    rows = re.match(r"(?:\|.*\|\n)*", rest)
    assert rows is not None
    there = rows[0].splitlines()
    places = [index for index, row in enumerate(there) if _cells(row)[0] == cells[0]]
    place = places[0] if places else len(there)
    there[place : place + 1] = [line(cells)]
    return "\n".join([f"{head}{separator.rstrip()}", *there, rest[rows.end() :]])


class Report:
    """Where rows go: to the terminal, and into the page if they are to be kept."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._table: Sequence[str] = ()

    def row(self, headings: Sequence[str], cells: Sequence[str]) -> None:
        """Print it, after the headings if it is the first one below them; keep it."""
        if headings != self._table:
            self._table = headings
            print(f"\n{line(headings)}\n|{'---|' * len(headings)}")
        print(line(cells), flush=True)
        if self._keep:
            PAGE.write_text(with_row(PAGE.read_text(), headings, cells))
