"""Streams between a replica and Ray Serve's own proxies: batches of responses, and flow control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from host.errors import ErrorCode, HostError
from host.ray import streams
from host.ray.streams import (
    MAX_BATCH_RESPONSES,
    WINDOW,
    AcknowledgedMessages,
    Received,
    ResponseBatches,
    StreamWindow,
)
from tests.conftest import DEADLINE


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, DEADLINE))


async def settle() -> None:
    """Lets all tasks run until they wait for this one."""
    for _ in range(20):
        await asyncio.sleep(0)


class Source:
    """An iterator that yields what is put into it."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()

    async def iterate(self) -> AsyncGenerator[Any, None]:
        while (item := await self.items.get()) != "end":
            if isinstance(item, BaseException):
                raise item
            yield item


def test_acknowledgements_come_between_messages_and_after_the_last_one() -> None:
    async def case() -> None:
        source = Source()
        merged = AcknowledgedMessages(source.iterate())
        source.items.put_nowait(b"one")
        assert await anext(merged) == b"one"
        waiting = asyncio.ensure_future(anext(merged))
        await settle()
        assert not waiting.done()
        merged.acknowledge()
        assert await waiting == 1
        merged.acknowledge()
        merged.acknowledge()
        assert await anext(merged) == 2
        source.items.put_nowait("end")
        assert await anext(merged) is None
        merged.acknowledge()
        assert await anext(merged) == 1
        waiting = asyncio.ensure_future(anext(merged))
        await settle()
        merged.finish()
        with pytest.raises(StopAsyncIteration):
            await waiting

    run(case())


def test_a_replica_sends_no_more_than_the_window_ahead() -> None:
    async def case() -> None:
        source = Source()
        window = StreamWindow(source.iterate())
        for _ in range(WINDOW):
            await window.wait_for_room()
        waiting = asyncio.ensure_future(window.wait_for_room())
        await settle()
        assert not waiting.done()
        source.items.put_nowait(1)
        await waiting
        waiting = asyncio.ensure_future(window.wait_for_room())
        source.items.put_nowait("end")
        with pytest.raises(HostError) as caught:
            await waiting
        assert caught.value.code is ErrorCode.CANCELLED

    run(case())


def test_messages_are_read_when_they_are_taken_unless_an_acknowledgement_is_due() -> None:
    async def case() -> None:
        source = Source()
        window = StreamWindow(source.iterate())
        for number in range(4):
            source.items.put_nowait(b"%d" % number)
        await settle()
        assert source.items.qsize() == 3
        for _ in range(WINDOW):
            await window.wait_for_room()
        source.items.put_nowait(2)
        window_full = asyncio.ensure_future(window.wait_for_room())
        messages = window.messages()
        assert await anext(messages) == b"0"
        await window_full  # behind three messages
        source.items.put_nowait(None)
        assert [message async for message in messages] == [b"1", b"2", b"3"]

    run(case())


def test_the_last_batch_of_the_window_makes_the_reader_look_for_acknowledgements() -> None:
    async def case() -> None:
        source = Source()
        window = StreamWindow(source.iterate())
        source.items.put_nowait(b"not taken by the model yet")
        await settle()
        for _ in range(WINDOW):
            await window.wait_for_room()
        waiting = asyncio.ensure_future(window.wait_for_room())
        source.items.put_nowait(1)
        await settle()
        assert waiting.done()

    run(case())


def test_an_error_of_the_proxy_is_not_a_cancellation() -> None:
    async def case() -> None:
        source = Source()
        window = StreamWindow(source.iterate())
        source.items.put_nowait(ConnectionError("the proxy has gone"))
        with pytest.raises(HostError, match="the proxy has gone") as caught:
            await anext(window.messages())
        assert caught.value.code is ErrorCode.UNAVAILABLE

    run(case())


def test_a_client_that_sends_and_never_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_WAITING_BYTES", 10)

    async def case() -> None:
        source = Source()
        window = StreamWindow(source.iterate())
        for _ in range(WINDOW):
            await window.wait_for_room()
        for _ in range(3):
            source.items.put_nowait(bytes(4))
        with pytest.raises(HostError, match="without reading its responses") as caught:
            await window.wait_for_room()
        assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED

    run(case())


def test_a_client_that_goes_cancels_the_stream() -> None:
    async def case() -> None:
        async def received() -> AsyncIterator[Received]:
            yield b"one"

        messages = StreamWindow(received()).messages()
        assert await anext(messages) == b"one"
        with pytest.raises(HostError) as caught:
            await anext(messages)
        assert caught.value.code is ErrorCode.CANCELLED

    run(case())


def test_ready_responses_are_one_batch_up_to_a_limit_and_an_error_comes_last() -> None:
    async def case() -> None:
        source = Source()
        batches = ResponseBatches(source.iterate())
        source.items.put_nowait(b"one")
        assert await anext(batches) == [b"one"]
        for _ in range(MAX_BATCH_RESPONSES + 1):
            source.items.put_nowait(b"more")
        source.items.put_nowait(HostError(ErrorCode.INTERNAL, "enough"))
        await settle()
        assert len(await anext(batches)) == MAX_BATCH_RESPONSES
        assert await anext(batches) == [b"more"]
        with pytest.raises(HostError, match="enough"):
            await anext(batches)

    run(case())


def test_closed_batches_close_the_stream() -> None:
    async def case() -> None:
        closed = asyncio.Event()

        async def responses() -> AsyncGenerator[bytes, None]:
            try:
                yield b"one"
                await asyncio.Event().wait()
            finally:
                closed.set()

        async with aclosing(ResponseBatches(responses())) as batches:
            assert await anext(batches) == [b"one"]
        assert closed.is_set()

    run(case())
