"""Counts the open inference requests of one endpoint, and drains them."""

from __future__ import annotations

import asyncio


class OpenRequests:
    """Belongs to the thread of the event loop. A frontend increments `count` for each request."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False
        """Whether new requests are refused."""
        self._all_answered = asyncio.Event()

    def request_finished(self) -> None:
        """Decrements `count` after a request was answered."""
        self.count -= 1
        if self.draining and not self.count:
            self._all_answered.set()

    async def drain(self, timeout: float) -> bool:
        """Refuses new requests and waits for open ones, at most `timeout` seconds.

        Returns False if some are still open.
        """
        self.draining = True
        if not self.count:
            return True
        try:
            await asyncio.wait_for(self._all_answered.wait(), max(timeout, 0.0))
        except asyncio.TimeoutError:
            return False
        return True
