"""The connections of the load generator, against servers that answer as each test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from host.frontends.grpc.h2 import frames
from host.load_generator import worker
from host.load_generator.http1_connection import Http1Connection
from host.load_generator.http2_connection import Http2Connection, encode_headers, frame_message
from host.load_generator.job import Job, Measured, Protocol, Report, Target
from host.load_generator.senders import Chain, GrpcStreamSender, HttpSender, Sender
from tests.conftest import DEADLINE

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"


def run(answer: Answer, use: Callable[[int], Awaitable[None]]) -> None:
    """Serves connections with `answer`, while `use` runs with the port."""

    async def serve() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await asyncio.wait_for(use(server.sockets[0].getsockname()[1]), DEADLINE)

    asyncio.run(serve())


async def read_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never answers."""
    while await reader.read(4096):
        pass
    writer.close()


def test_a_connection_whose_request_timed_out_takes_no_other_one() -> None:
    async def use(port: int) -> None:
        loop, measured = asyncio.get_running_loop(), Measured()
        free: list[Sender] = []
        _, connection = await loop.create_connection(
            lambda: Http1Connection(False), "127.0.0.1", port
        )
        sender = HttpSender(connection, Chain([REQUEST]), measured, free.append)
        sender.send(0.0, 0.0)
        sender.abandon()
        assert free == [sender]
        assert not sender.is_usable
        assert measured.failures == {"timeout": 1}

    run(read_on, use)


def test_messages_after_the_error_of_a_stream_are_not_those_of_the_next_request() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.settings({}))
        while b"the request" not in await reader.read(4096):
            pass
        errors = frame_message(b"\x0a\x05first") + frame_message(b"\x0a\x06second")
        header = frames.frame_header(len(errors), frames.DATA, 0, 1)
        writer.write(header + errors + frames.ping(b"01234567", ack=False))
        received = b""
        while b"01234567" not in received:  # it has read what is before
            received += await reader.read(4096)
        answered.set()
        await read_on(reader, writer)

    async def use(port: int) -> None:
        loop, measured = asyncio.get_running_loop(), Measured()
        _, connection = await loop.create_connection(
            lambda: Http2Connection(encode_headers([(b":method", b"POST")])), "127.0.0.1", port
        )
        await connection.ready
        chain = Chain([frame_message(b"the request")])
        sender = GrpcStreamSender(connection, chain, measured, lambda one: one.send(0.0, 0.0))
        sender.send(0.0, 0.0)
        await answered.wait()
        assert sender.busy
        assert measured.messages == {"stream error": "first"}
        assert measured.failures == {"stream error": 1}
        connection.close()

    answered = asyncio.Event()
    run(answer, use)


def test_requests_that_wait_for_a_connection_are_backlog_and_not_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(port: int) -> None:
        reports: list[Report] = []
        target = Target("127.0.0.1", port, False, Protocol.HTTP)
        load = worker.Load(Job(target, [[REQUEST]], rate=1000.0, requests=20), reports.append)
        load.start()
        late, backlog = 0, 0
        while backlog < 19:
            await asyncio.sleep(0)
            cut = load.cut()
            late, backlog = late + len(cut.lateness) // 8, cut.backlog
        load.close()
        assert (late, backlog, reports) == (20, 19, [])

    monkeypatch.setattr(worker, "_MOST_CONNECTIONS", 1)
    run(read_on, use)


def test_a_load_that_ends_waits_for_responses_and_sends_no_more_requests() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            arrived.set()
            await ending.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def use(port: int) -> None:
        target = Target("127.0.0.1", port, False, Protocol.HTTP)
        for job, answered in (
            (Job(target, [[REQUEST]], rate=1000.0), False),
            (Job(target, [[REQUEST]], concurrency=1), True),
        ):
            reports: list[Report] = []
            arrived.clear()
            load = worker.Load(job, reports.append)
            load.start()
            await arrived.wait()
            load.cut()
            if answered:
                asyncio.get_running_loop().call_soon(ending.set)
            await load.finish()
            last = load.cut()
            assert (last.lateness, last.failures, reports) == (b"", {}, [])
            assert last.responses == answered

    arrived, ending = asyncio.Event(), asyncio.Event()
    run(answer, use)
