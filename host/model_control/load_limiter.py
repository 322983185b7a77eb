"""Limits how many model versions load at the same time, and records which load waits for which."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from host.errors import invalid_argument


class LoadLimiter:
    """A semaphore of `count` slots that every load of a version holds. Belongs to the event loop.

    A model may load other models in its `initialize`. Its own load gives its slot back while it
    waits for them, so that even one slot is enough. A load that would wait for itself is refused.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[asyncio.Future[None]] = deque()
        self._waits: dict[str, list[str]] = {}

    async def __aenter__(self) -> None:
        while self._free <= 0:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            finally:
                self._queue.remove(turn)
        self._free -= 1

    async def __aexit__(self, *_: object) -> None:
        self._release_slot()

    @contextmanager
    def lend_slot(self, requester: str, target: str) -> Iterator[None]:
        """While entered, the load of model `requester` waits for that of `target`, without a slot.

        Raises HostError INVALID_ARG if neither load could ever end.
        """
        chain = self.find_wait_chain(target, requester)
        if chain:
            raise invalid_argument(
                f"'initialize' of model '{requester}' asks for it, and would wait for itself:"
                f" {' -> '.join([requester, *chain])}. Load one of them before the others, or from"
                " 'execute'"
            )
        with self.waits_for(requester, target):
            self._release_slot()
            try:
                yield
            finally:
                self._free -= 1  # without waiting: a load that has begun goes on

    @contextmanager
    def waits_for(self, requester: str, target: str) -> Iterator[None]:
        """While entered, the load of `requester`, which holds no slot yet, waits for `target`."""
        self._waits.setdefault(requester, []).append(target)
        try:
            yield
        finally:
            self._waits[requester].remove(target)
            if not self._waits[requester]:
                del self._waits[requester]

    def find_wait_chain(self, start: str, end: str) -> list[str]:
        """The models from `start` to `end`, each waiting for the next; empty without a chain."""
        if start == end:
            return [end]
        for following in self._waits.get(start, ()):
            rest = self.find_wait_chain(following, end)
            if rest:
                return [start, *rest]
        return []

    def _release_slot(self) -> None:
        self._free += 1
        for turn in self._queue:  # all of them, as one that is woken may have been cancelled
            if not turn.done():
                turn.set_result(None)
