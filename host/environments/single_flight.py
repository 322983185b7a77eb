"""Work that several ask for at the same time and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from host.errors import unavailable

_STOPPING = "the server is stopping"

_Result = TypeVar("_Result")


class SingleFlight(Generic[_Result]):
    """Whoever asks for a key while its work is under way gets the same result, or error."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[_Result]] = {}
        self._closed = False

    async def run_once(self, key: Hashable, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """The result. One who asks may be cancelled without harm to the others.

        Raises what the work raises, and HostError UNAVAILABLE once this is closed.
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
            task.exception()  # whoever waits gets it; nobody need wait

    async def close(self) -> None:
        """Cancel what is under way, and wait until it has ended."""
        self._closed = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
