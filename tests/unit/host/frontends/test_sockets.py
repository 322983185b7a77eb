"""The number of unsent bytes of a transport."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from host.frontends.sockets import SocketWriter, unsent_bytes
from tests.conftest import DEADLINE


class Orphan(asyncio.Transport):
    """A transport whose socket has gone: uvloop's of TLS, after the client's end."""

    def get_write_buffer_size(self) -> int:
        return 7


def test_unsent_bytes_of_a_transport_without_a_socket_are_those_of_its_buffer() -> None:
    assert unsent_bytes(Orphan()) == 7


def test_a_closed_transport_has_no_unsent_bytes() -> None:
    async def close() -> int:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        lost = loop.create_future()

        class Listener(asyncio.Protocol):
            def connection_lost(self, error: Exception | None) -> None:
                lost.set_result(None)

        transport, _ = await loop.create_connection(Listener, sock=ours)
        theirs.close()
        transport.abort()
        await asyncio.wait_for(lost, DEADLINE)
        return unsent_bytes(transport)

    assert uvloop.run(close()) == 0


def test_unsent_bytes_include_unread_bytes_of_the_peer() -> None:
    async def write() -> int:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        transport.write(b"x" * 1000)
        found = unsent_bytes(transport)
        transport.abort()
        theirs.close()
        return found

    assert uvloop.run(write()) >= 1000


Run = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = request.param
    return chosen


async def connected(near: socket.socket) -> asyncio.Transport:
    near.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)
    return transport


def test_small_writes_reach_the_socket_at_once(run: Run) -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        with far:
            transport = await connected(near)
            far.setblocking(False)
            SocketWriter(transport).write(b"now")
            assert far.recv(10) == b"now"
            transport.close()

    run(check())


def test_bytes_that_the_socket_does_not_accept_are_sent_later_in_order(run: Run) -> None:
    parts = [os.urandom(999) for _ in range(1000)]

    async def check() -> None:
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with far:
            transport = await connected(near)
            writer = SocketWriter(transport)
            for part in parts:
                writer.write(part)
            assert transport.get_write_buffer_size() > 0
            far.setblocking(False)
            found = bytearray()
            loop = asyncio.get_running_loop()
            while len(found) < sum(map(len, parts)):
                found += await asyncio.wait_for(loop.sock_recv(far, 1 << 16), DEADLINE)
                writer.write(b"")
            assert bytes(found) == b"".join(parts)
            transport.close()

    run(check())


def test_a_closed_connections_file_descriptor_is_not_written_to(run: Run) -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        number = near.fileno()
        reader, other = os.pipe()
        os.set_blocking(reader, False)
        with far:
            transport = await connected(near)
            writer = SocketWriter(transport)
            transport.abort()
            await asyncio.wait_for(closed(number), DEADLINE)
            os.dup2(other, number)
            try:
                writer.write(b"for somebody else")
                with pytest.raises(BlockingIOError):
                    os.read(reader, 100)
            finally:
                for descriptor in (number, reader, other):
                    os.close(descriptor)

    run(check())


async def closed(number: int) -> None:
    while True:
        try:
            os.fstat(number)
        except OSError:
            return
        await asyncio.sleep(0)
