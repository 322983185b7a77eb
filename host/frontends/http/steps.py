"""Work that is done in steps of about a millisecond, between which other work may run."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")

Steps = Generator[None, None, _Result]
"""Yields after each step but the last, and returns the result."""


async def run_in_turns(steps: Steps[_Result]) -> _Result:
    """Returns the result of all steps; each one has a turn of the event loop."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: _Result = done.value
            return result
        await asyncio.sleep(0)
