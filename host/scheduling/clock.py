"""Time as schedulers see it: what it is now, and being called when it is later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that has been arranged."""

    def cancel(self) -> None:
        """It need not come any more."""


class Clock(Protocol):
    """All times and durations are nanoseconds; now is CLOCK_MONOTONIC, like `Call.queued_ns`."""

    def now(self) -> int:
        """What time it is."""

    def call_later(self, delay: int, callback: Callable[[], None]) -> Timer:
        """Call back about then. It may come a little early: look at the clock and ask again."""

    def call_after_reading(self, callback: Callable[[], None]) -> None:
        """Call back when what has arrived by then is read, once what is to be sent now has left."""


class LoopClock:
    """The clock of the event loop that runs."""

    def now(self) -> int:
        """What time it is."""
        return time.monotonic_ns()

    def call_later(self, delay: int, callback: Callable[[], None]) -> Timer:
        """Call back from the event loop, on whose thread this must be called."""
        return asyncio.get_running_loop().call_later(delay / 1e9, callback)

    def call_after_reading(self, callback: Callable[[], None]) -> None:
        """Call back in the next turn but one: the loop reads between two turns."""
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, callback)
