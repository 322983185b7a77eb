"""One timer for many deadlines: it expires at the earliest one, or a little before."""

from __future__ import annotations

from collections.abc import Callable

from host.scheduling.clock import Clock, Timer


class CoalescingTimer:
    """Calls `ring` at the scheduled time; the callee checks the clock and schedules again.

    Times are nanoseconds of the clock.
    """

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._timer: Timer | None = None
        self._at = 0

    def schedule(self, at: int) -> None:
        """Schedules the timer, unless an earlier time is scheduled."""
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        self._timer = self._clock.call_later(max(1, at - self._clock.now()), self._expired)

    def cancel(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        self._ring()
