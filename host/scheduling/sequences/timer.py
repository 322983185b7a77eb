"""One timer for many times: it rings at the earliest of them, or a little before."""

from __future__ import annotations

from collections.abc import Callable

from host.scheduling.clock import Clock, Timer


class CoalescingTimer:
    """Calls `ring` at the time that was set; whoever is rung looks at the clock and sets it again.

    Times are nanoseconds of the clock.
    """

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._timer: Timer | None = None
        self._at = 0

    def schedule(self, at: int) -> None:
        """Ring at that time, if nothing earlier has been set."""
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        self._timer = self._clock.call_later(max(1, at - self._clock.now()), self._expired)

    def cancel(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        self._ring()
