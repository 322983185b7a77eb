"""So many events, and then only so many per second: for what costs its sender nothing."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """A number of events that refills with time."""

    __slots__ = ("_most", "_rate", "_left", "_seen", "_clock")

    def __init__(
        self, most: int, per_second: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._most = float(most)
        self._rate = per_second
        self._left = float(most)
        self._seen = self._clock()

    def spend(self) -> bool:
        """Take one; False if none is left."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._seen) * self._rate) - 1.0
        self._seen = now
        if self._left < 0.0:
            self._left = 0.0
            return False
        return True
