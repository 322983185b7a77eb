"""Answers chats, completions and responses: one call per choice, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from host.frontends.http.http_exchange import HttpExchange
from host.frontends.openai.generation import KeepAlive
from host.frontends.receive_memory import ReceiveBudget
from tests.conftest import DEADLINE


def exchange(send: Callable[[Any], Awaitable[None]]) -> HttpExchange:
    async def receive() -> Any:
        raise AssertionError("the body is not read")

    scope: dict[str, Any] = {"method": "POST", "headers": []}
    return HttpExchange(scope, receive, send, ReceiveBudget())


async def read_comments(count: int) -> list[bytes]:
    sent: asyncio.Queue[Any] = asyncio.Queue()
    keep_alive = KeepAlive(exchange(sent.put), seconds=0.01)
    try:
        messages = [await asyncio.wait_for(sent.get(), DEADLINE) for _ in range(count)]
    finally:
        keep_alive.close()
    assert all(message["more_body"] for message in messages)
    return [message["body"] for message in messages]


def test_a_silent_stream_gets_comments() -> None:
    assert asyncio.run(read_comments(3)) == [b": \n\n"] * 3


async def close_while_the_client_does_not_read() -> list[str]:
    written: list[str] = []
    writing, readable = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        writing.set()
        await readable.wait()
        written.append(message["body"])

    keep_alive = KeepAlive(exchange(send), seconds=0.001)
    await asyncio.wait_for(writing.wait(), DEADLINE)  # a comment waits for the client
    keep_alive.close()
    readable.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=DEADLINE)
    return written


def test_a_comment_that_waits_for_the_client_is_not_sent_after_the_close() -> None:
    assert asyncio.run(close_while_the_client_does_not_read()) == []
