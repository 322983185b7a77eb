"""How many inference requests at one door are not answered yet, and the end of taking any."""

from __future__ import annotations

import asyncio


class OpenRequests:
    """Belongs to the event loop's thread. Whoever takes a request adds one to `count`."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False
        """Whether no new request is taken."""
        self._all_answered = asyncio.Event()

    def request_finished(self) -> None:
        """One request is answered."""
        self.count -= 1
        if self.draining and not self.count:
            self._all_answered.set()

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and wait for what is open, at most `timeout` seconds.

        False if the time was too short.
        """
        self.draining = True
        if not self.count:
            return True
        try:
            await asyncio.wait_for(self._all_answered.wait(), max(timeout, 0.0))
        except asyncio.TimeoutError:
            return False
        return True
