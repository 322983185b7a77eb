"""How many model versions load at a time, and which loads wait for which."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from host.errors import invalid_argument


class LoadLimiter:
    """Entered by every load of a version, one of `count` at a time. Belongs to the event loop.

    A model may load others in its `initialize`. Its own load does not count as long as it waits
    for them, so no number of slots is too small; and what would wait for itself is refused.
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
    def lend_slot(self, asker: str, target: str) -> Iterator[None]:
        """While entered, the load of model `asker` waits for that of `target`.

        Raises HostError INVALID_ARG if neither could ever end.
        """
        chain = self.find_wait_chain(target, asker)
        if chain:
            raise invalid_argument(
                f"'initialize' of model '{asker}' asks for it, and would wait for itself:"
                f" {' -> '.join([asker, *chain])}. Load one of them before the others, or from"
                " 'execute'"
            )
        with self.waits_for(asker, target):
            self._release_slot()
            try:
                yield
            finally:
                self._free -= 1  # without waiting: a load that has begun is to go on

    @contextmanager
    def waits_for(self, asker: str, target: str) -> Iterator[None]:
        """While entered, the load of `asker` waits for that of `target`, and has no place yet."""
        self._waits.setdefault(asker, []).append(target)
        try:
            yield
        finally:
            self._waits[asker].remove(target)
            if not self._waits[asker]:
                del self._waits[asker]

    def find_wait_chain(self, start: str, end: str) -> list[str]:
        """The models from `start` to `end`, each of which waits for the next; none if it cannot."""
        if start == end:
            return [end]
        for following in self._waits.get(start, ()):
            rest = self.find_wait_chain(following, end)
            if rest:
                return [start, *rest]
        return []

    def _release_slot(self) -> None:
        self._free += 1
        for turn in self._queue:  # all of them: one that is woken may have been cancelled
            if not turn.done():
                turn.set_result(None)
