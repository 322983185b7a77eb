"""Prints the report of a campaign of faults."""

from __future__ import annotations

import pytest

from tests.faults.campaign import SCALE, format_table, rows


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how long the witness of each fault waited."""
    if SCALE and rows:
        terminalreporter.section("faults")
        for line in format_table():
            terminalreporter.write_line(line)
