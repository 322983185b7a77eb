"""HTTP requests that a frontend process passes on, and that fail there."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest

from host.frontend_processes.core_link import CoreLink
from host.frontend_processes.frontend_connection import FrontendConnection
from host.frontend_processes.frontend_link import BudgetFile
from host.frontend_processes.frontend_messages import EndExchange
from host.frontend_processes.frontend_process import Forwarder
from host.frontends.http1.asgi import Message, Receive, Send
from host.instances.arenas import Arenas
from tests.unit.host.frontends.grpc.echo_core import EchoCore

DEADLINE = 60
SCOPE: dict[str, Any] = {"method": "POST", "raw_path": b"/v2", "headers": []}


async def answer_error(send: Send) -> None:
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b"error"})


@pytest.mark.parametrize("failing", ["receive", "send", "send two parts"])
def test_the_application_in_the_core_ends_after_an_error_in_the_frontend(failing: str) -> None:
    """Also if it still sends an error response, as it does when it is cancelled."""

    async def main() -> None:
        ended = asyncio.Event()

        async def app(scope: Message, receive: Receive, send: Send) -> None:
            try:
                if failing == "receive":
                    await receive()
                elif failing == "send":
                    await answer_error(send)
                else:
                    await asyncio.gather(answer_error(send), answer_error(send))
            except asyncio.CancelledError:
                await answer_error(send)
                assert (await receive())["type"] == "http.disconnect"
                ended.set()

        async def fail(message: Message | None = None) -> Any:
            raise RuntimeError("a bug in the frontend")

        arenas = Arenas(1 << 20)
        connection = FrontendConnection(
            "frontend", EchoCore(), {}, app, None, arenas, lambda: None, lambda _: None
        )
        budget = BudgetFile(1)
        spawn = connection.spawn_arguments(0, -1, -1, budget)
        ends = asyncio.Event()

        def handle(message: Any) -> None:
            forwarder.handle(message)
            if isinstance(message, EndExchange):
                ends.set()

        control = socket.socket(fileno=os.dup(spawn.control))
        events = spawn.to_frontend, spawn.to_core
        link = CoreLink(spawn.rings, events, control, handle, lambda *_: None, lambda: None)
        forwarder = Forwarder(link)
        try:
            with pytest.raises(RuntimeError, match="a bug in the frontend"):
                await asyncio.wait_for(forwarder(SCOPE, fail, fail), DEADLINE)
            await asyncio.wait_for(ended.wait(), DEADLINE)
            await asyncio.wait_for(ends.wait(), DEADLINE)
        finally:
            for descriptor in (control.fileno(), spawn.to_frontend):
                asyncio.get_running_loop().remove_reader(descriptor)
            control.close()
            connection.close()
            budget.close()
            arenas.close()

    asyncio.run(main())
