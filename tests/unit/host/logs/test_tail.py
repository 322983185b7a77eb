"""The last lines of the log."""

from __future__ import annotations

from host.logs.tail import LogTail


def test_lines_are_numbered_and_old_ones_are_missed() -> None:
    tail = LogTail(2)
    assert (tail.lines_after(0).last, tail.lines_after(0).lines) == (0, [])
    for line in ("one", "two", "three"):
        tail.add(line)
    found = tail.lines_after(0)
    assert (found.last, found.missed, found.lines) == (3, 1, ["two", "three"])
    assert tail.lines_after(2).lines == ["three"]
    assert tail.lines_after(3).lines == []
    assert tail.lines_after(3).missed == 0


def test_a_number_of_an_earlier_server_counts_as_none() -> None:
    tail = LogTail(2)
    tail.add("one")
    assert tail.lines_after(99).lines == ["one"]


def test_long_lines_are_cut_and_colours_are_left_out() -> None:
    tail = LogTail(2)
    tail.add("\x1b[1;31mred\x1b[0m")
    tail.add("x" * 5000)
    red, long = tail.lines_after(0).lines
    assert red == "red"
    assert long == "x" * 4096 + " ... and 904 characters"
