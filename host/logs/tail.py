"""The last lines of the log, for clients that watch it."""

from __future__ import annotations

import re
from collections import deque

import msgspec

_MAX_CHARACTERS = 4096  # of a line
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LogLines(msgspec.Struct, frozen=True):
    """Lines of the log.

    `last`: the number of the newest line of the log; the first one has number 1. `missed`: lines
    that were asked for and are no longer kept. `lines`: the others, the oldest first; one may
    contain newlines.
    """

    last: int
    missed: int
    lines: list[str]


class LogTail:
    """The newest `limit` lines of a log. One thread at a time adds lines."""

    def __init__(self, limit: int) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=limit)
        self._last = 0

    def add(self, line: str) -> None:
        """Adds a line; a long one is cut."""
        self._last += 1
        if len(line) > _MAX_CHARACTERS:
            line = f"{line[:_MAX_CHARACTERS]} ... and {len(line) - _MAX_CHARACTERS} characters"
        self._lines.append((self._last, line))

    def lines_after(self, number: int) -> LogLines:
        """The lines after the one with a number, all without colours.

        A number that the log has not reached comes from an earlier server: all lines are new then.
        """
        kept = list(self._lines)  # at once, as another thread may add lines meanwhile
        last = kept[-1][0] if kept else self._last
        after = number if number <= last else 0
        new = [_COLOURS.sub("", line) for place, line in kept if place > after]
        return LogLines(last, last - after - len(new), new)
