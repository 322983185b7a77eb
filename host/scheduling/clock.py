"""The clock of schedulers: the current time, and timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A timer that was started."""

    def cancel(self) -> None:
        """Cancels the timer."""


class Clock(Protocol):
    """A clock in nanoseconds of CLOCK_MONOTONIC, like `Call.queued_ns`."""

    def now(self) -> int:
        """The current time."""

    def call_later(self, delay: int, callback: Callable[[], None]) -> Timer:
        """Calls back after about `delay`; it may be a little early, so check the time again."""

    def call_after_reading(self, callback: Callable[[], None]) -> None:
        """Calls back once what has arrived was read and what was written has left."""


class LoopClock:
    """The clock of the running event loop."""

    def now(self) -> int:
        """The current time."""
        return time.monotonic_ns()

    def call_later(self, delay: int, callback: Callable[[], None]) -> Timer:
        """Calls back from the event loop, whose thread must be the caller."""
        return asyncio.get_running_loop().call_later(delay / 1e9, callback)

    def call_after_reading(self, callback: Callable[[], None]) -> None:
        """Calls back in the next turn but one, as the loop reads between two turns."""
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, callback)
