"""A token bucket: limits the rate of events that cost their sender nothing."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """A number of tokens that refills with time."""

    __slots__ = ("_capacity", "_rate", "_tokens", "_updated_at", "_clock")

    def __init__(
        self, capacity: int, per_second: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._capacity = float(capacity)
        self._rate = per_second
        self._tokens = float(capacity)
        self._updated_at = self._clock()

    def consume(self) -> bool:
        """Takes one token; returns False if there is none."""
        now = self._clock()
        self._tokens = (
            min(self._capacity, self._tokens + (now - self._updated_at) * self._rate) - 1.0
        )
        self._updated_at = now
        if self._tokens < 0.0:
            self._tokens = 0.0
            return False
        return True
