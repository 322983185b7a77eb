"""The frontend as it stops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from host.frontends.grpc.h2.frontend import H2Frontend
from host.frontends.grpc.methods import Services
from tests.conftest import DEADLINE


class DrainingService:
    """Is drained once a client has been accepted, in the turn of the loop that accepted it."""

    def __init__(self) -> None:
        self.accepted = asyncio.get_running_loop().create_future()

    def services(self) -> Services:
        return {}

    def connection_hook(self) -> Callable[[], None]:
        self.accepted.set_result(None)
        return lambda: None

    async def drain(self, timeout: float) -> bool:
        await self.accepted
        return True


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_stop_closes_a_connection_that_was_accepted_just_before(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        service = DrainingService()
        frontend = H2Frontend(service, "127.0.0.1", 0, connection_hooks=service.connection_hook)
        port = await frontend.start()
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as client:
            await frontend.stop(0)
            client.setblocking(False)
            received = b""
            while data := client.recv(1 << 16):  # raises BlockingIOError if it is still open
                received += data
        assert b"\x07" in received  # the type of GOAWAY

    loop = new_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), DEADLINE))
    finally:
        loop.close()
