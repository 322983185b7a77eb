"""Waiting, with a deadline, for what announces itself to nobody: on loops, and in models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.conftest import DEADLINE

UNTIL = """
import threading


def until(condition, what):
    pause = threading.Event()
    for _ in range(6000):  # a minute
        if condition():
            return
        pause.wait(0.01)
    raise TimeoutError(f"waited a minute in vain for {what}")


"""
"""Source for the head of a model: `until` returns once a condition holds."""


async def eventually(
    condition: Callable[[], bool],
    what: str,
    seconds: float = DEADLINE,
    state: Callable[[], object] = lambda: "",
) -> None:
    """Return once the condition holds; fail with `what` and the state when the time is over.

    As `wait_until` of the conftest, on a loop that goes on meanwhile.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, f"waited {seconds} s in vain for {what} {state()}"
        await asyncio.sleep(0.01)
