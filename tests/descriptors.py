"""Descriptors of a process, to see which ones are new."""

from __future__ import annotations

import os
from contextlib import suppress


def descriptors(pid: int | str = "self") -> set[tuple[int, str]]:
    """Numbers, and what they stand for.

    Compare sets, not counts: threads and garbage of earlier tests may close some meanwhile.
    """
    found: set[tuple[int, str]] = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the descriptor that lists the others
            found.add((int(number), os.readlink(f"/proc/{pid}/fd/{number}")))
    return found
