"""Responses of a stream in batches: all that are ready travel together.

Each message between a replica and a proxy costs Ray more than most responses cost a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

MAX_BATCH_BYTES = 1 << 20
MAX_BATCH_RESPONSES = 256


class ResponseBatches:
    """Reads responses ahead, up to the limits of one batch. An asynchronous iterator.

    An error of `responses` is raised after those before it. Belongs to one event loop.
    """

    def __init__(self, responses: AsyncGenerator[bytes, None]) -> None:
        self._ready: list[bytes] = []
        self._bytes = 0
        self._changed = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read(responses))
        self._reader.add_done_callback(lambda _: self._changed.set())

    async def _read(self, responses: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(responses):
            async for response in responses:
                self._ready.append(response)
                self._bytes += len(response)
                self._changed.set()
                while self._bytes >= MAX_BATCH_BYTES or len(self._ready) >= MAX_BATCH_RESPONSES:
                    await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def __aiter__(self) -> AsyncIterator[list[bytes]]:
        return self

    async def __anext__(self) -> list[bytes]:
        while not self._ready:
            if self._reader.done():
                self._reader.result()
                raise StopAsyncIteration
            await self._wait_for_change()
        batch, self._ready, self._bytes = self._ready, [], 0
        self._changed.set()
        return batch

    async def aclose(self) -> None:
        """Cancels what is in progress, and waits for its end."""
        self._reader.cancel()
        await asyncio.wait([self._reader])
        if not self._reader.cancelled():
            self._reader.exception()  # the stream ends in any case
