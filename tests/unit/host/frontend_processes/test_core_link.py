"""A frontend process's connection to the core: blocking questions, and the order of messages."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from host.frontend_processes import frontend_messages as m
from host.frontend_processes.core_link import CoreLink
from stub.wire.ring import RING_BYTES
from tests.unit.host.frontend_processes.core_thread import DEADLINE, CoreThread


class Handled:
    """The numbers of the messages that the frontend has handled; 3 is the last one."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.last = asyncio.Event()


def run(core: CoreThread, test: Callable[[CoreLink, Handled], Awaitable[None]]) -> None:
    """Runs a test in the loop of the frontend; message 1 asks a question while it is handled."""

    async def frontend() -> None:
        handled = Handled()

        def on_message(message: m.ToFrontend) -> None:
            assert isinstance(message, m.RequestAccepted)
            if message.number == 1:
                link.ask_now(m.FindModel(100, "model", -1), 100)
            handled.numbers.append(message.number)
            if message.number == 3:
                handled.last.set()

        link = CoreLink(
            core.files.memory, core.events, ours, on_message, lambda *_: None, lambda: None
        )
        await test(link, handled)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        asyncio.run(frontend())


def test_a_question_is_asked_while_the_ring_is_full(core: CoreThread) -> None:
    async def test(link: CoreLink, handled: Handled) -> None:
        link.send(m.ExchangeBody(5, bytes(2 * RING_BYTES), False, False))
        assert link.ask_now(m.FindModel(6, "model", -1), 6) == b"found"

    run(core, test)
    assert [type(message) for message in core.received] == [m.ExchangeBody, m.FindModel]


def test_messages_stay_in_order_when_a_handler_asks_a_question(core: CoreThread) -> None:
    core.before_reply = m.RequestAccepted(3)

    async def test(link: CoreLink, handled: Handled) -> None:
        core.send(m.RequestAccepted(1), m.RequestAccepted(2))
        await asyncio.wait_for(handled.last.wait(), DEADLINE)
        assert handled.numbers == [1, 2, 3]

    run(core, test)


def test_messages_that_come_during_a_question_are_handled_after_it(core: CoreThread) -> None:
    core.before_reply = m.RequestAccepted(3)

    async def test(link: CoreLink, handled: Handled) -> None:
        assert link.ask_now(m.FindModel(6, "model", -1), 6) == b"found"
        assert not handled.numbers
        await asyncio.wait_for(handled.last.wait(), DEADLINE)
        assert handled.numbers == [3]

    run(core, test)
