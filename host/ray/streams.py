"""Streams between a replica and Ray Serve's own proxies: batches of responses, and flow control.

Each message between a replica and a proxy costs Ray more than most responses cost a model.

A proxy acknowledges each batch of responses that it has passed on to the client. The replica sends
`WINDOW` batches ahead of the acknowledgements. They travel between the messages of the client: an
int is a number of batches, and None is the end of the client's messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from host.errors import ErrorCode, HostError, unavailable

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


WINDOW = 4
"""Batches of responses that may be on their way."""

MAX_WAITING_BYTES = 64 << 20
"""Bytes of messages that wait in a replica for a client that does not read its responses."""

Received = bytes | int | None


class AcknowledgedMessages:
    """In a proxy: the messages of a client, with the acknowledgements. An asynchronous iterator."""

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self._messages = messages
        self._upcoming: asyncio.Future[bytes] | None = None
        self._batches = 0
        self._half_closed = self._finished = False
        self._changed = asyncio.Event()

    def acknowledge(self) -> None:
        """To be called when a batch of responses was passed on."""
        self._batches += 1
        self._changed.set()

    def finish(self) -> None:
        """Ends the iteration."""
        self._finished = True
        self._changed.set()
        if self._upcoming is not None:
            # It ends with the RPC. To cancel it would free memory that grpcio still writes to.
            self._upcoming.add_done_callback(lambda read: read.cancelled() or read.exception())

    def __aiter__(self) -> AsyncIterator[Received]:
        return self

    async def __anext__(self) -> Received:
        while True:
            self._changed.clear()
            if self._batches:
                count, self._batches = self._batches, 0
                return count
            if self._finished:
                raise StopAsyncIteration
            if self._upcoming is None and not self._half_closed:
                self._upcoming = asyncio.ensure_future(anext(self._messages))
                self._upcoming.add_done_callback(lambda _: self._changed.set())
            if self._upcoming is not None and self._upcoming.done():
                upcoming, self._upcoming = self._upcoming, None
                try:
                    return upcoming.result()
                except StopAsyncIteration:
                    self._half_closed = True
                    return None
            await self._changed.wait()


class StreamWindow:
    """In a replica: takes what `AcknowledgedMessages` sends apart. Belongs to one event loop.

    `received`: what Ray Serve passes to the method of a stream.
    """

    def __init__(self, received: AsyncIterator[Received]) -> None:
        self._received = received
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._open = WINDOW  # batches that may be sent
        self._half_closed = False
        self._changed = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())
        self._reader.add_done_callback(self._reading_finished)

    def _reading_finished(self, reader: asyncio.Future[None]) -> None:
        if not reader.cancelled():
            reader.exception()  # raised for the waiting callers
        self._changed.set()

    def _client_gone(self) -> HostError:
        """Why no more messages arrive."""
        error = None if self._reader.cancelled() else self._reader.exception()
        if isinstance(error, HostError):
            return error
        if error is not None:
            return unavailable(f"the proxy's stream of messages has failed: {error}")
        return HostError(ErrorCode.CANCELLED, "the client has cancelled the stream")

    async def _read(self) -> None:
        async for one in self._received:
            if isinstance(one, int):
                self._open += one
            elif one is None:
                self._half_closed = True
            else:
                self._messages.append(one)
                self._waiting_bytes += len(one)
            self._changed.set()
            # Reads no message ahead, unless it has to find an acknowledgement.
            while self._messages and self._open > 0:
                await self._wait_for_change()
            if self._waiting_bytes > MAX_WAITING_BYTES:
                raise HostError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"the client has sent {self._waiting_bytes} bytes of requests on one stream"
                    f" without reading its responses (limit: {MAX_WAITING_BYTES}); read them, or"
                    " use several streams",
                )

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields the messages of the client. Raises HostError CANCELLED if it has gone."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._waiting_bytes -= len(message)
                self._changed.set()
                yield message
            if self._half_closed:
                return
            if self._reader.done():
                break
            await self._wait_for_change()
        raise self._client_gone()

    async def wait_for_room(self) -> None:
        """Returns once another batch may be sent. Raises HostError if the client has gone."""
        while self._open <= 0:
            if self._reader.done():
                raise self._client_gone()
            await self._wait_for_change()
        self._open -= 1
        if self._open == 0:
            self._changed.set()  # an acknowledgement is due, which the reader has to find

    def close(self) -> None:
        """Reads no more."""
        self._reader.cancel()
