"""Reads and writes the tables of docs/explanation/performance.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "performance.md"


def table_row(cells: Sequence[str]) -> str:
    """Formats cells as a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def tables(text: str) -> list[list[list[str]]]:
    """All tables of a page, as rows of cells. The first row has the headings."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    every = [[_cells(row) for row in table.splitlines()] for table in found]
    return [[head, *rows] for head, _, *rows in every]


def with_row(text: str, headings: Sequence[str], cells: Sequence[str]) -> str:
    """Inserts a row into the table with these headings, and returns the page.

    The row replaces the row with the same first cell, or becomes the last one. Raises ValueError if
    the page has no such table.
    """
    head, separator, rest = text.partition(f"{table_row(headings)}\n")
    if not separator:
        raise ValueError(f"{PAGE.name} has no table with the headings {table_row(headings)}")
    rows = re.match(r"(?:\|.*\|\n)*", rest)
    assert rows is not None
    there = rows[0].splitlines()
    places = [index for index, row in enumerate(there) if _cells(row)[0] == cells[0]]
    place = places[0] if places else len(there)
    there[place : place + 1] = [table_row(cells)]
    return "\n".join([f"{head}{separator.rstrip()}", *there, rest[rows.end() :]])


class Report:
    """Prints rows, and writes them into the page if `keep` is set."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._table: Sequence[str] = ()

    def row(self, headings: Sequence[str], cells: Sequence[str]) -> None:
        """Prints a row, after the headings if they have changed, and writes it if `keep` is set."""
        if headings != self._table:
            self._table = headings
            print(f"\n{table_row(headings)}\n|{'---|' * len(headings)}")
        print(table_row(cells), flush=True)
        if self._keep:
            PAGE.write_text(with_row(PAGE.read_text(), headings, cells))
