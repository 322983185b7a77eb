"""Waiting with a deadline for events without a notification, and a loop with a fake clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.conftest import DEADLINE

UNTIL_SOURCE = """
import threading


def until(condition, what):
    pause = threading.Event()
    for _ in range(12_000):  # two minutes
        if condition():
            return
        pause.wait(0.01)
    raise TimeoutError(f"waited two minutes in vain for {what}")


"""
"""Source for the head of a model: `until` returns once a condition holds."""


async def eventually(
    condition: Callable[[], bool],
    what: str,
    seconds: float = DEADLINE,
    state: Callable[[], object] = lambda: "",
) -> None:
    """Returns once the condition holds; fails with `what` and the state when the time is over.

    As `wait_until` of the conftest, on a loop that continues meanwhile.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, f"waited {seconds} s in vain for {what} {state()}"
        await asyncio.sleep(0.01)


class FakeClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when a test advances it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def advance_from_thread(self, seconds: float) -> None:
        """Advances the time, from another thread; returns when all timers that are due have run."""
        asyncio.run_coroutine_threadsafe(self.advance(seconds), self).result(DEADLINE)

    async def advance(self, seconds: float) -> None:
        """The same in the loop."""
        self._now += seconds
        for _ in range(2):  # timers run in the turn after the turn that finds them due
            await asyncio.sleep(0)
