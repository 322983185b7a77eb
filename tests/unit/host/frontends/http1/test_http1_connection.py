"""One HTTP/1.1 connection, with size limits and timeouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from host.frontends.http1.asgi import App, Message, Receive, Send
from host.frontends.http1.http1_connection import Timeouts
from host.frontends.http1.listener import HttpListener
from host.frontends.sockets import unsent_bytes
from tests.conftest import DEADLINE
from tests.waiting import FakeClockLoop

_Result = TypeVar("_Result")

SOON = 0.05
"""The timeout in seconds that a test checks; the other timeouts are much longer."""

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[_Result]]


def served(app: App, timeouts: Timeouts, client: Client[_Result]) -> _Result:
    """Runs an application and a client that is connected to it; returns the client's result."""

    async def main() -> _Result:
        listener = HttpListener(app, "127.0.0.1", 0, timeouts=timeouts)
        port = await listener.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await turns(lambda: bool(listener._connections))
                return await client(reader, writer)
            finally:
                writer.close()
        finally:
            await listener.stop(DEADLINE)

    loop = FakeClockLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


async def passes(writer: asyncio.StreamWriter, seconds: float) -> None:
    """Waits for the sent data to arrive, lets the time pass, then waits for the results."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FakeClockLoop)
    transport = writer.transport
    assert isinstance(transport, asyncio.Transport)
    await turns(lambda: not unsent_bytes(transport))
    await loop.advance(seconds)
    await turns()


async def turns(arrived: Callable[[], bool] = lambda: True) -> None:
    """Runs the loop until `arrived` is true, and some more turns; its clock does not advance."""
    until = time.monotonic() + DEADLINE
    while not arrived():
        assert time.monotonic() < until
        await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)


class Application:
    """Reads the body and responds with a given number of bytes; records a cancellation."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.asked = 0
        self.cancelled = asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.asked += 1
        try:
            while (await receive()).get("more_body"):
                pass
            length = (b"content-length", b"%d" % self.size)
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            left = self.size
            while left:
                part = min(left, 1 << 20)
                left -= part
                await send(
                    {"type": "http.response.body", "body": b"x" * part, "more_body": left > 0}
                )
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


HEADERS = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n"


@pytest.mark.parametrize("sent", [b"G", b"POST / HTTP/1.1\r\n", HEADERS], ids=["1", "17", "50"])
def test_incomplete_headers_time_out(sent: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(sent)
        await passes(writer, SOON)
        return await reader.read()

    app = Application()
    answer = served(app, Timeouts(header_timeout=SOON), client)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"\r\nconnection: close\r\n" in answer
    assert answer.endswith(b'{"error":"The request did not arrive in time"}')
    assert not app.asked


def test_slow_bytes_do_not_extend_the_timeout() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        answer = asyncio.create_task(reader.read())
        writer.write(HEADERS + b"x-a: ")
        while not answer.done():
            writer.write(b"b")
            await passes(writer, SOON / 10)
        return answer.result()

    assert served(Application(), Timeouts(header_timeout=SOON), client).startswith(b"HTTP/1.1 408 ")


def test_a_connection_without_a_request_times_out() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        await passes(writer, SOON)
        return await reader.read()

    assert served(Application(), Timeouts(header_timeout=SOON), client) == b""


def test_a_body_below_the_minimum_data_rate_is_rejected() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEADERS + b"\r\nthe beginning")
        await passes(writer, SOON)
        return await reader.read()

    app = Application()
    answer = served(app, Timeouts(data_rate_interval=SOON), client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert app.asked and app.cancelled.is_set()


def test_a_client_that_reads_no_response_is_disconnected() -> None:
    app = Application(1 << 30)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(writer.transport, asyncio.Transport)
        writer.transport.pause_reading()
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        while not app.cancelled.is_set():
            await passes(writer, SOON)

    served(app, Timeouts(data_rate_interval=SOON), client)


def test_an_idle_connection_times_out() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nxx")
        await passes(writer, 5 * SOON)  # time of the first check
        return await reader.read()

    assert (
        served(Application(), Timeouts(header_timeout=5 * SOON, idle_timeout=SOON), client) == b""
    )


def test_a_connection_waiting_for_a_response_is_not_idle() -> None:
    go_on = asyncio.Event()

    async def app(scope: Message, receive: object, send: Callable[..., Awaitable[None]]) -> None:
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"at last"})

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = asyncio.create_task(reader.readuntil(b"at last"))
        for _ in range(10):  # each timeout could expire here
            await passes(writer, SOON)
        assert not answer.done()
        go_on.set()
        return await answer

    timeouts = Timeouts(header_timeout=5 * SOON, data_rate_interval=SOON, idle_timeout=SOON)
    assert served(app, timeouts, client).startswith(b"HTTP/1.1 200 ")
