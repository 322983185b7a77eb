"""The fast path and the task path give the same responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from host.frontends.http1.asgi import Message
from host.frontends.http1.http1_connection import Timeouts
from host.frontends.http1.listener import HttpListener
from host.frontends.http1.parser import ResponseCallback
from host.instances.busy_polling import ConnectionHooks, no_connection_hook
from tests.conftest import DEADLINE

HEAD = b"POST /quick HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Held:
    """A request that the test answers; when cancelled, it gets status 503."""

    def __init__(self, body: bytes, done: ResponseCallback) -> None:
        self.body = body
        self._done = done
        self.cancelled = asyncio.Event()

    def answer(self, text: bytes = b"prompt ") -> None:
        parts = (text, self.body)
        size = sum(map(len, parts))
        self._done(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % size, parts)

    def cancel(self) -> None:
        self.cancelled.set()
        self._done(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n", ())


class Application:
    """Echoes bodies. `/quick` uses the fast path, except with `decline`, `hold` or `fail`.

    The body of a response tells which path the request took.
    """

    def __init__(self) -> None:
        self.decline = self.hold = self.fail = False
        self.heads: list[tuple[bytes, dict[bytes, bytes]]] = []
        self.understood = asyncio.Event()
        self.held: asyncio.Queue[_Held] = asyncio.Queue()

    def fast_path(
        self, url: bytes, headers: Mapping[bytes, bytes]
    ) -> Callable[[bytes, ResponseCallback], _Held | None] | None:
        self.heads.append((url, dict(headers)))
        self.understood.set()
        return self._start if url == b"/quick" else None

    def _start(self, body: bytes, done: ResponseCallback) -> _Held | None:
        if self.decline:
            return None
        if self.fail:
            raise ValueError("a defect")
        held = _Held(body, done)
        if self.hold:
            self.held.put_nowait(held)
        else:
            held.answer()
        return held

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        body = b"usual "
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


def served(
    app: Application,
    client: Client,
    timeouts: Timeouts | None = None,
    connection_hooks: ConnectionHooks = no_connection_hook,
) -> None:
    async def main() -> None:
        listener = HttpListener(
            app,
            "127.0.0.1",
            0,
            timeouts=timeouts,
            fast_path=app.fast_path,
            connection_hooks=connection_hooks,
        )
        port = await listener.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await client(reader, writer)
            finally:
                writer.close()
        finally:
            await listener.stop(DEADLINE)

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Reads the body of the next response on an open connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" not in head
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def closing_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Reads status line and body of the last response on a connection."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    return head.split(b"\r\n")[0], body


def test_a_request_head_is_parsed_once() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in (b"abcd", b"efgh", b"ijkl"):
            writer.write(HEAD + body)
            assert await answer(reader) == b"prompt " + body

    app = Application()
    served(app, client)
    assert app.heads == [(b"/quick", {b"host": b"x", b"content-length": b"4"})]


@pytest.mark.parametrize("head", [HEAD, HEAD.replace(b"/quick", b"/usual")])
def test_the_connection_hook_runs_once_per_request(head: bytes) -> None:
    heard: list[int] = []

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(1, 4):
            for part in (head, b"ab", b"cd"):
                writer.write(part)
                await writer.drain()
                await turns()
            assert (await answer(reader)).endswith(b" abcd")
            assert sum(heard) == number

    served(Application(), client, connection_hooks=lambda: lambda: heard.append(1))


def test_the_fast_path_serves_a_body_that_arrives_after_its_head() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in (b"abcd", b"efgh"):
            writer.write(HEAD)
            await writer.drain()
            await turns()
            writer.write(body)
            assert await answer(reader) == b"prompt " + body

    app = Application()
    served(app, client)


async def turns() -> None:
    """Lets the server, which runs in the same event loop, read the sent bytes."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_body_in_many_parts_is_served_by_a_task() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = HEAD.replace(b" 4\r", b" 6000\r")
        writer.write(head)
        await turns()
        for _ in range(6):
            writer.write(b"x" * 1000)
            await writer.drain()
            await turns()
        assert (await answer(reader))[-6000:] == b"x" * 6000
        writer.write(HEAD + b"abcd")
        assert await answer(reader) == b"prompt abcd"

    app = Application()
    served(app, client)


@pytest.mark.parametrize(
    "head",
    [
        HEAD.replace(b"quick", b"other"),
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host", b"connection: keep-alive\r\nhost"),
        HEAD.replace(b"host: x", b"connection: close"),
        HEAD.replace(b"host: x", b"expect: 100-continue"),
        HEAD.replace(b"host: x", b"connection: upgrade\r\nupgrade: h2c"),
        HEAD.replace(b"host: x", b"x-long: " + b"x" * 3000),
    ],
    ids=["other", "http/1.0", "close", "expect", "upgrade", "long"],
)
def test_unusual_request_heads_are_served_by_a_task(head: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"abcd")
        writer.write_eof()
        assert (await reader.read()).endswith(b"usual abcd")

    served(Application(), client)


@pytest.mark.parametrize(
    "more",
    [
        *(b"content-length: 4\r\n", b"Content-Length: 5\r\n", b"transfer-encoding: chunked\r\n"),
        *(b"bad name: x\r\n", b"no-colon\r\n", b"x: \0\r\n", b"x: a\rb\r\n"),
    ],
)
def test_heads_that_proxies_may_read_otherwise_never_get_the_fast_path(more: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD[:-2] + more + b"\r\nabcd")
        writer.write_eof()
        assert b"prompt" not in await reader.read()

    app = Application()
    served(app, client)
    assert app.heads == []


def test_the_first_header_of_a_name_counts() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD[:-2] + b"X-A: 1\r\nx-a: 2\r\nX-A: 3\r\n\r\nabcd")
        assert await answer(reader) == b"prompt abcd"

    app = Application()
    served(app, client)
    assert app.heads[0][1][b"x-a"] == b"1"


def test_a_chunked_body_is_served_by_a_task() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = HEAD.replace(b"content-length: 4", b"transfer-encoding: chunked")
        writer.write(head + b"4\r\nabcd\r\n0\r\n\r\n")
        assert await answer(reader) == b"usual abcd"

    served(Application(), client)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"1111" + HEAD + b"2222")
        assert await answer(reader) == b"usual 1111"
        assert await answer(reader) == b"usual 2222"
        app.hold = True
        writer.write(HEAD + b"3333")
        held = await app.held.get()
        writer.write(HEAD + b"4444")
        await writer.drain()
        await turns()
        held.answer()
        assert await answer(reader) == b"prompt 3333"
        assert (await answer(reader))[-4:] == b"4444"

    app = Application()
    served(app, client)


def test_a_request_declined_by_the_fast_path_is_served_by_a_task() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app.decline = True
        writer.write(HEAD + b"abcd")
        assert await answer(reader) == b"usual abcd"
        app.decline = False
        writer.write(HEAD + b"abcd")
        assert await answer(reader) == b"prompt abcd"

    app = Application()
    served(app, client)


def test_a_large_response_is_complete() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app.hold = True
        writer.write(HEAD + b"abcd")
        text = bytes(range(256)) * 4096
        (await app.held.get()).answer(text)
        assert await answer(reader) == text + b"abcd"

    app = Application()
    served(app, client)


def test_an_unexpected_exception_is_logged_and_answered_with_500(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app.fail = True
        writer.write(HEAD + b"abcd")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
        assert await reader.readexactly(30) == b'{"error":"unexpected failure"}'
        app.fail = False
        writer.write(HEAD + b"abcd")
        assert await answer(reader) == b"prompt abcd"

    app = Application()
    served(app, client)
    assert "a defect" in caplog.text


def test_a_disconnected_client_cancels_its_request() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app.hold = True
        writer.write(HEAD + b"abcd")
        held = await app.held.get()
        writer.close()
        await held.cancelled.wait()

    app = Application()
    served(app, client)


def test_a_missing_body_times_out() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"ab")
        status, body = await closing_answer(reader)
        assert status == b"HTTP/1.1 408 Request Timeout"
        assert body == b'{"error":"The request did not arrive in time"}'

    served(Application(), client, Timeouts(data_rate_interval=0.05))


def test_stopping_finishes_a_request_and_closes_its_connection() -> None:
    async def main() -> None:
        app = Application()
        app.hold = True
        listener = HttpListener(app, "127.0.0.1", 0, fast_path=app.fast_path)
        reader, writer = await asyncio.open_connection("127.0.0.1", await listener.start())
        writer.write(HEAD + b"abcd")
        held = await app.held.get()
        stopping = asyncio.create_task(listener.stop(DEADLINE))
        await asyncio.sleep(0)
        held.answer()
        assert await closing_answer(reader) == (b"HTTP/1.1 200 OK", b"prompt abcd")
        await stopping
        writer.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def test_a_request_that_outlives_the_grace_period_gets_503() -> None:
    async def main() -> None:
        app = Application()
        app.hold = True
        listener = HttpListener(app, "127.0.0.1", 0, fast_path=app.fast_path)
        reader, writer = await asyncio.open_connection("127.0.0.1", await listener.start())
        writer.write(HEAD + b"abcd")
        held = await app.held.get()
        await listener.stop(0.0)
        assert held.cancelled.is_set()
        assert await closing_answer(reader) == (b"HTTP/1.1 503 Service Unavailable", b"")
        writer.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def test_stopping_serves_a_request_whose_body_arrives_later() -> None:
    async def main() -> None:
        app = Application()
        listener = HttpListener(app, "127.0.0.1", 0, fast_path=app.fast_path)
        reader, writer = await asyncio.open_connection("127.0.0.1", await listener.start())
        writer.write(HEAD + b"ab")
        await app.understood.wait()
        stopping = asyncio.create_task(listener.stop(DEADLINE))
        await asyncio.sleep(0)
        writer.write(b"cd")
        assert await closing_answer(reader) == (b"HTTP/1.1 200 OK", b"usual abcd")
        await stopping
        writer.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE))
