"""A semaphore whose holders may lend their slot while they wait for work that needs one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class LendableSemaphore:
    """`async with` holds one of `count` slots; 0 means no limit. Belongs to the event loop."""

    def __init__(self, count: int) -> None:
        self._free = count or 1 << 30
        self._queue: deque[asyncio.Future[None]] = deque()

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
    def lend(self) -> Iterator[None]:
        """While entered, a holder's slot is free for others. It is taken back without a wait.

        So for a moment one holder more may continue, as its work has begun already.
        """
        self._release_slot()
        try:
            yield
        finally:
            self._free -= 1

    def _release_slot(self) -> None:
        self._free += 1
        for turn in self._queue:  # all of them, as one that is woken may have been cancelled
            if not turn.done():
                turn.set_result(None)
