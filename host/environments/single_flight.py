"""Runs work once for all callers that request it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from host.errors import unavailable

_STOPPING = "the server is stopping"

_Result = TypeVar("_Result")


class SingleFlight(Generic[_Result]):
    """Callers with the same key share one run of the work, and its result or error."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[_Result]] = {}
        self._closed = False

    async def run_once(self, key: Hashable, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Runs the work, or waits for a run with the same key that has not ended.

        Cancelling one caller does not cancel the work. Raises the work's exception, and HostError
        UNAVAILABLE after `close`.
        """
        if self._closed:
            raise unavailable(_STOPPING)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(work())
            task.add_done_callback(lambda done: self._on_done(key, done))
        await asyncio.wait([task])
        if task.cancelled():
            raise unavailable(_STOPPING)
        return task.result()

    def _on_done(self, key: Hashable, task: asyncio.Future[_Result]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: the callers may be cancelled

    async def close(self) -> None:
        """Cancels all running work and waits for its end."""
        self._closed = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
