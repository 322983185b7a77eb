"""The core as a frontend process sees it: requests that cannot be sent."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from host.frontend_processes import messages as m
from host.frontend_processes.core_link import CoreLink
from host.frontend_processes.core_proxy import CoreProxy
from host.frontend_processes.frontend_memory import FrontendMemory
from host.inference.request import InferRequest, Tensor
from stub.wire.arena import create_arena_file
from tests.unit.host.frontend_processes.core_thread import CoreThread

LIMIT = 1 << 24


def test_the_inputs_of_a_request_that_a_defect_ends_are_released(core: CoreThread) -> None:
    core.answer = b""  # the configuration of the model

    async def main() -> None:
        link = CoreLink(core.files, ours, lambda _: None, lambda *_: None, lambda: None)
        memory = FrontendMemory(1, arena, LIMIT, lambda: None, lambda: None)
        proxy = CoreProxy(link, memory, False, False)
        large = Tensor("INPUT0", "UINT8", [1 << 20], bytes(1 << 20))
        wrong = InferRequest("model", [large], output_placement={"OUTPUT0": object()})
        with pytest.raises(AssertionError):
            proxy.infer(wrong)
        proxy.infer(InferRequest("model", [large]))
        link.ask_now(m.FindModel(1 << 20, "last", -1), 1 << 20)

    arena = create_arena_file("pbhost-test", LIMIT)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        asyncio.run(main())
    os.close(arena)
    (request,) = (message for message in core.received if isinstance(message, m.Infer))
    assert request.inputs[0].offset == 0  # where the first request has been
