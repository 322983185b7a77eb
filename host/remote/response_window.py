"""The flow control of responses between two servers."""

from __future__ import annotations

import asyncio
from collections import deque

WINDOW_BYTES = 4 << 20
"""Bytes of tensors of one request's responses from which on the next one waits."""


class ResponseWindow:
    """Lets the next response wait while too many are not acknowledged. Belongs to one event loop.

    `most`: responses from which on the next one waits, if `WINDOW_BYTES` of them do not suffice.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: deque[int] = deque()  # of the responses that are not acknowledged
        self._bytes = 0
        self._changed = asyncio.Event()

    def sent(self, size: int) -> None:
        """Counts a response with `size` bytes of tensors."""
        self._sizes.append(size)
        self._bytes += size

    def acknowledge(self, count: int = 1) -> None:
        """The receiver has taken the oldest ones."""
        for _ in range(min(count, len(self._sizes))):
            self._bytes -= self._sizes.popleft()
        self._changed.set()

    async def wait(self) -> None:
        """Returns once another response may be sent."""
        while len(self._sizes) >= self._most or self._bytes >= WINDOW_BYTES:
            self._changed.clear()
            await self._changed.wait()
