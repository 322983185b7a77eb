"""The health of the server: liveness, readiness, and a watchdog of its event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from host.health import EventLoopWatchdog
from tests.conftest import DEADLINE
from tests.waiting import eventually


def compute_until(ended: Callable[[], object]) -> None:
    """Does not return to the loop before."""
    end = time.monotonic() + DEADLINE
    while not ended():
        assert time.monotonic() < end


def takes_turn(seconds: float, watchdog: EventLoopWatchdog, lag: float) -> bool:
    """Computes for that long in the loop; whether a lag above this one has been measured."""
    end = time.monotonic() + seconds
    compute_until(lambda: time.monotonic() >= end)
    return watchdog.lag() > lag


def test_a_long_turn_of_the_loop_is_measured() -> None:
    async def main() -> None:
        watchdog = EventLoopWatchdog(limit=60)
        await eventually(lambda: takes_turn(0.5, watchdog, 0.2), "the lag to be measured")
        await asyncio.to_thread(watchdog.close)

    asyncio.run(main())


def test_a_turn_over_the_limit_is_logged_once_with_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def hold_up() -> None:
        watchdog = EventLoopWatchdog(limit=0.2)
        compute_until(lambda: caplog.records)
        await eventually(lambda: watchdog.lag() > 0, "the first turn to be measured")
        first = watchdog.lag()
        await eventually(lambda: takes_turn(2 * first, watchdog, first), "a longer turn")
        await asyncio.to_thread(watchdog.close)

    with caplog.at_level(logging.WARNING, "pbhost"):
        asyncio.run(hold_up())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("The event loop has not run for 0.2 seconds")
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
