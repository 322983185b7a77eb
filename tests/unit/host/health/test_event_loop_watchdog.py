"""A loop that runs, one that is held up, and one that is closed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from host.health.event_loop_watchdog import EventLoopWatchdog
from tests.waiting import eventually


def hold_up(seconds: float) -> None:
    """Computes in the thread of the loop."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_long_turn_of_the_loop_is_measured() -> None:
    async def main() -> None:
        watchdog = EventLoopWatchdog(limit=60)
        hold_up(0.5)
        await eventually(lambda: watchdog.lag() > 0.2, "the lag to be measured")
        await asyncio.to_thread(watchdog.close)

    asyncio.run(main())


def test_a_turn_over_the_limit_is_logged_once_with_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        watchdog = EventLoopWatchdog(limit=0.05)
        await eventually(lambda: watchdog.lag() > 0, "the first measurement")
        for _ in range(2):
            hold_up(0.5)
            await asyncio.sleep(0.2)
        await asyncio.to_thread(watchdog.close)

    with caplog.at_level(logging.WARNING, "pbhost"):
        asyncio.run(main())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("The event loop has not run for 0.05 seconds")
    assert "in hold_up" in line


def test_no_thread_is_left() -> None:
    async def main() -> None:
        watchdog = EventLoopWatchdog()
        await asyncio.to_thread(watchdog.close)

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() == before


def test_a_loop_that_is_closed_ends_the_thread() -> None:
    async def main() -> EventLoopWatchdog:
        return EventLoopWatchdog()

    watchdog = asyncio.run(main())
    watchdog._thread.join(60)
    assert not watchdog._thread.is_alive()
