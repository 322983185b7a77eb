"""Small answers go to the socket at once, in order with what the transport has yet to send."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from host.frontends.socket_writer import SocketWriter
from tests.conftest import DEADLINE

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
