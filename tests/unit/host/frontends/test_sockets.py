"""The number of unsent bytes of a transport."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from host.frontends.sockets import unsent_bytes
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
