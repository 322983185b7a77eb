"""A stream as an asynchronous iterator, for engines that read and write with coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from host.errors import unavailable
from host.frontends.grpc.methods import RpcContext, StreamHandler, StreamHandlerFactory
from host.frontends.receive_memory import ReservedBytes

Reserve = Callable[[bytes], ReservedBytes | None]
"""Counts the memory of a received message. Raises OutOfReceiveMemory."""


async def serve_stream(
    open_stream: StreamHandlerFactory,
    requests: AsyncIterator[bytes],
    context: RpcContext,
    reserve: Reserve,
    set_retry: Callable[[int], None],
) -> AsyncGenerator[bytes, None]:
    """Yields the messages for the client; raises the error that ends the stream.

    `set_retry` gets milliseconds before the end if the last request was above a limit. The next
    message is taken once the one before it is written. A generator that is closed early cancels the
    requests of the stream.
    """
    writer = _QueueWriter()
    handler = open_stream(writer, context)
    reader = asyncio.ensure_future(writer.read_messages(handler, requests, reserve))
    reader.add_done_callback(writer.reading_finished)
    try:
        while (message := await writer.outgoing.get()) is not None:
            yield message
            handler.resume_writing()
    finally:
        writer.finished = True
        reader.cancel()
        handler.cancel()
    if writer.retry is not None:
        set_retry(writer.retry)
    if writer.error is not None:
        raise writer.error


class _QueueWriter:
    """Holds at most one message and the end."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.error: BaseException | None = None
        self.retry: int | None = None
        self.finished = False
        self._may_read = asyncio.Event()

    def write_message(self, message: bytes, more: bool) -> bool:
        self.outgoing.put_nowait(message)
        return False

    def resume_reading(self) -> None:
        self._may_read.set()

    def finish_stream(self, error: BaseException | None = None, retry: int | None = None) -> None:
        self.error, self.retry, self.finished = error, retry, True
        self.outgoing.put_nowait(None)

    async def read_messages(
        self, handler: StreamHandler, requests: AsyncIterator[bytes], reserve: Reserve
    ) -> None:
        async for data in requests:
            if self.finished:
                return
            self._may_read.clear()
            if not handler.message_received(data, reserve(data)):
                await self._may_read.wait()
        if not self.finished:
            handler.half_closed()

    def reading_finished(self, reader: asyncio.Future[None]) -> None:
        if reader.cancelled():
            if not self.finished:  # by the iterator of the messages, not by `serve_stream`
                self.finish_stream(unavailable("the messages of the stream were cancelled"))
        elif (error := reader.exception()) is not None:
            self.finish_stream(error)
