"""The token bucket: limits the rate of events."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Limits the rate of events. `capacity` events may arrive at once, then `per_second`."""

    __slots__ = ("_capacity", "_rate", "_tokens", "_updated_at", "_clock")

    def __init__(
        self, capacity: float, per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._capacity = capacity
        self._rate = per_second
        self._tokens = capacity
        self._updated_at = clock()

    def has_tokens(self, count: float = 1.0) -> bool:
        """Whether there are tokens for an event."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._updated_at) * self._rate)
        self._updated_at = now
        return self._tokens >= count

    def consume(self, count: float = 1.0) -> bool:
        """Takes tokens for an event. Returns False, and takes none, if there are too few."""
        if not self.has_tokens(count):
            return False
        self._tokens -= count
        return True

    def give_back(self, count: float = 1.0) -> None:
        """Returns tokens that were taken for an event that does not happen."""
        self._tokens = min(self._capacity, self._tokens + count)

    def seconds_until_token(self) -> float:
        """The seconds until there is one token, as of the last call of another method."""
        return max(0.0, (1.0 - self._tokens) / self._rate)

    def set_limits(self, capacity: float, per_second: float) -> None:
        """Changes the limits; tokens that were taken stay taken."""
        self.has_tokens()
        self._tokens = max(0.0, min(self._tokens + capacity - self._capacity, capacity))
        self._capacity, self._rate = capacity, per_second
