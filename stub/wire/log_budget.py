"""Limits the log lines of one stub, as the event loop of the host writes those of all stubs.

The stub keeps the limit. The host allows twice as much: only lines of a model that bypasses the
limit of its stub exceed that.
"""

import threading
import time
from typing import Callable

LINES_PER_SECOND = 2_000
CHARACTERS_PER_SECOND = 1 << 20
BURST_SECONDS = 5
"""Seconds of silence after which a stub may log five times as much at once."""


class LogBudget:
    """Counts the lines of a stub against its budget, from any thread.

    `factor`: how many times the limits above it allows.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, factor: int = 1) -> None:
        self._clock = clock
        self._lines_per_second = LINES_PER_SECOND * factor
        self._characters_per_second = CHARACTERS_PER_SECOND * factor
        self._lock = threading.RLock()  # a finaliser may log while this thread logs
        self._lines = float(self._lines_per_second * BURST_SECONDS)
        self._characters = float(self._characters_per_second * BURST_SECONDS)
        self._updated_at = clock()
        self._reported_at = float("-inf")
        self._dropped = 0

    def admit(self, characters: int) -> bool:
        """Takes the cost of a line from the budget. Returns False if the line must be dropped."""
        with self._lock:
            now = self._clock()
            seconds, self._updated_at = now - self._updated_at, now
            self._lines = _refill(self._lines, seconds, self._lines_per_second)
            self._characters = _refill(self._characters, seconds, self._characters_per_second)
            if self._lines < 1 or self._characters < characters:
                self._dropped += 1
                return False
            self._lines -= 1
            self._characters -= characters
            return True

    def report(self, at_once: bool = False) -> str:
        """Returns a line about the lines that were dropped since the last report, "" for none.

        There is one report per second, unless it is wanted `at_once`.
        """
        if not self._dropped:
            return ""
        with self._lock:
            now = self._clock()
            if not self._dropped or (now < self._reported_at + 1 and not at_once):
                return ""
            dropped, self._dropped, self._reported_at = self._dropped, 0, now
        return (
            f"dropped {dropped} log lines: an instance may log {self._lines_per_second} lines"
            f" and {self._characters_per_second >> 20} MiB of text per second"
        )


def _refill(tokens: float, seconds: float, per_second: int) -> float:
    return min(float(per_second * BURST_SECONDS), tokens + seconds * per_second)
