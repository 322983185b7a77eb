"""How many inference requests at the HTTP door are not answered yet, and the end of taking any."""

from __future__ import annotations

import asyncio


class OpenRequests:
    """Belongs to the event loop's thread. `exiting` once draining has begun."""

    def __init__(self) -> None:
        self.count = 0
        self._drained: asyncio.Event | None = None  # exists once draining has begun

    @property
    def exiting(self) -> bool:
        """Whether no new request is taken."""
        return self._drained is not None

    def leave(self) -> None:
        """One request is answered; whoever takes one adds to `count`."""
        self.count -= 1
        if self._drained is not None and not self.count:
            self._drained.set()

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and wait for what is open, at most `timeout` seconds.

        False if the time was too short.
        """
        if self._drained is None:
            self._drained = asyncio.Event()
        if not self.count:
            self._drained.set()
            return True
        try:
            await asyncio.wait_for(self._drained.wait(), max(timeout, 0.0))
        except asyncio.TimeoutError:
            return False
        return True
