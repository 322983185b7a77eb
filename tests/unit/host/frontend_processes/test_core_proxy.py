"""The core as a frontend process sees it: requests that recur, and those that cannot be sent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError
from host.frontend_processes import frontend_messages as m
from host.frontend_processes.core_link import CoreLink
from host.frontend_processes.core_proxy import CoreProxy
from host.frontend_processes.exchanged_memory import FrontendMemory
from host.frontend_processes.remote_state import RemoteTrace
from host.frontends.grpc.methods import INFERENCE_SERVICE, Metadata
from host.frontends.grpc.service import GrpcService
from host.inference.request import InferRequest, RequestShape, Tensor
from stub.wire.arena import Block, create_arena_file
from tests.unit.host.frontend_processes.core_thread import CoreThread

LIMIT = 1 << 24


def run(core: CoreThread, test: Callable[[CoreProxy], None]) -> list[m.Infer | m.RepeatedInfer]:
    """Runs a test, and returns the requests that it has sent."""
    core.answer = b""  # the configuration of the model

    async def main() -> None:
        link = CoreLink(
            core.files.memory, core.events, ours, lambda _: None, lambda *_: None, lambda: None
        )
        memory = FrontendMemory(1, arena, LIMIT, lambda: None, lambda: None)
        test(CoreProxy(link, memory, False, False))
        link.ask_now(m.FindModel(1 << 20, "last", -1), 1 << 20)

    arena = create_arena_file("pbhost-test", LIMIT)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        asyncio.run(main())
    os.close(arena)
    return [one for one in core.received if isinstance(one, (m.Infer, m.RepeatedInfer))]


def request(shape: RequestShape | None = None, size: int = 4, **fields: Any) -> InferRequest:
    tensor = Tensor("INPUT0", "UINT8", [size], bytes(size))
    return InferRequest("model", [tensor], shape=shape, **fields)


@pytest.mark.parametrize("shape", [None, RequestShape()])
def test_the_inputs_of_a_request_that_a_defect_ends_are_released(
    core: CoreThread, shape: RequestShape | None
) -> None:
    def test(proxy: CoreProxy) -> None:
        if shape:
            for _ in range(2):
                proxy.infer(request(shape, 1 << 20))
        wrong = request(None, 1 << 20, output_placement={"OUTPUT0": object()})
        with pytest.raises(AssertionError):
            proxy.infer(wrong)
        with pytest.raises(HostError, match="cannot be sent"):
            proxy.infer(request(shape, 1 << 20, id="\udc80"))
        proxy.infer(request(shape, 1 << 20))

    *first, last = run(core, test)
    if isinstance(last, m.Infer):
        assert not first and last.inputs[0].offset == 0  # where the wrong requests have been
    else:
        assert last.contents == [2 << 20] and isinstance(first[1], m.Infer)


def templates(sent: list[m.Infer | m.RepeatedInfer]) -> list[tuple[str, int]]:
    """How each request was sent, and its template."""
    return [("full" if isinstance(one, m.Infer) else "again", one.template) for one in sent]


def test_a_request_that_recurs_is_sent_without_its_fields(core: CoreThread) -> None:
    def test(proxy: CoreProxy) -> None:
        shape, other = RequestShape(), RequestShape()
        for id in ("one", "two", "three"):
            proxy.infer(request(shape, id=id))
        for _ in range(3):
            proxy.infer(request(other, 5))
        proxy.infer(request(shape), unary=True)  # another use of it
        proxy.infer(request(shape, parameters={"header": "value"}))  # came with the connection
        proxy.infer(request(other, 5))

    sent = run(core, test)
    assert templates(sent[:6]) == [
        *(("full", 0), ("full", 1), ("again", 1)),
        *(("full", 0), ("full", 2), ("again", 2)),
    ]
    assert templates(sent[6:]) == [("full", 0), ("full", 0), ("again", 2)]
    assert [message.id for message in sent[:3]] == ["one", "two", "three"]


def test_equal_requests_over_grpc_are_sent_without_their_fields(core: CoreThread) -> None:
    def test(proxy: CoreProxy) -> None:
        service = GrpcService(proxy, {INFERENCE_SERVICE: []})
        for id in "abcdef":
            message = pb.ModelInferRequest(model_name="model", id=id)
            message.inputs.add(name="INPUT0", datatype="UINT8", shape=[4])
            message.raw_input_contents.append(id.encode() * 4)
            service.start_infer(message.SerializeToString(), lambda _: None, Metadata())

    last = run(core, test)[-1]
    assert isinstance(last, m.RepeatedInfer)
    assert (last.id, last.contents) == ("f", [b"ffff"])


def test_each_sequence_has_a_template_of_its_own(core: CoreThread) -> None:
    """Requests of all sequences share a shape, and the template has the sequence."""

    def test(proxy: CoreProxy) -> None:
        shape = RequestShape()
        for correlation_id, flags in ((1, 1), (1, 0), ("1", 0)) * 3:
            proxy.infer(request(shape, correlation_id=correlation_id, flags=flags))

    assert templates(run(core, test)) == [
        *[("full", 0)] * 3,
        *(("full", 1), ("full", 2), ("full", 3)),
        *(("again", 1), ("again", 2), ("again", 3)),
    ]


def test_the_templates_of_many_requests_are_replaced(core: CoreThread) -> None:
    shapes = [RequestShape() for _ in range(300)]

    def test(proxy: CoreProxy) -> None:
        for shape in (
            *shapes[:150],
            *shapes[:150],
            *shapes[150:],
            *shapes[150:],
            shapes[-1],
            *[shapes[0]] * 2,
        ):
            proxy.infer(request(shape))

    sent = templates(run(core, test))
    assert sent[150:300] == [("full", number) for number in range(1, 151)]
    assert sent[450:600] == [("full", number) for number in (*range(151, 257), *range(1, 45))]
    known, *forgotten = sent[600:]
    assert known == ("again", 44)
    assert forgotten == [("full", 0), ("full", 45)]


def test_requests_that_never_recur_push_no_template_out(core: CoreThread) -> None:
    """Such as those that contain their tensors as JSON."""
    recurring, others = RequestShape(), [RequestShape() for _ in range(1000)]

    def test(proxy: CoreProxy) -> None:
        for shape in (*[recurring] * 2, *others, recurring):
            proxy.infer(request(shape))

    *sent, last = templates(run(core, test))
    assert last == ("again", 1)
    assert sent == [("full", 0), ("full", 1), *[("full", 0)] * 1000]


def test_a_request_that_is_sent_in_full_takes_no_template_of_another(core: CoreThread) -> None:
    shape, traced, other, confirmed = RequestShape(), RequestShape(), RequestShape(), RequestShape()

    def test(proxy: CoreProxy) -> None:
        for _ in range(2):
            proxy.infer(request(shape))
        for again in (shape, traced, traced, shape):
            proxy.infer(request(again, trace=RemoteTrace(proxy._link, "model", {})))
        for _ in range(2):
            waiting = proxy.infer_when_loaded(request(confirmed))
            waiting.send(None)  # it is sent, and waits for the core
            waiting.close()
        for _ in range(2):
            proxy.infer(request(other, 5))
        proxy.infer(request(shape))
        proxy.infer(request(other, 5))

    sent = run(core, test)
    assert templates(sent) == [
        *(("full", 0), ("full", 1)),
        *[("full", 0)] * 6,
        *(("full", 0), ("full", 2)),
        *(("again", 1), ("again", 2)),
    ]


def reserved(memory: FrontendMemory, size: int) -> tuple[Block, memoryview]:
    found = memory.reserve_block(size)
    assert found is not None
    return found


def test_a_tensor_that_was_received_into_the_arena_is_not_copied() -> None:
    async def main() -> None:
        memory = FrontendMemory(1, arena, LIMIT, lambda: None, lambda: None)
        (_first, _), (block, data) = (reserved(memory, 1 << 20) for _ in range(2))
        data[:] = b"x" * len(data)
        received = Tensor("INPUT0", "UINT8", [len(data)], block.data, block)
        assert memory.encode_content(received, 8) == block.offset == 1 << 20
        assert memory.encode_content(request(size=1 << 20).inputs[0], 8) == 2 << 20

    arena = create_arena_file("pbhost-test", LIMIT)
    asyncio.run(main())
    os.close(arena)


def test_what_is_being_received_has_a_quarter_of_the_arena() -> None:
    """The rest is for complete requests."""

    async def main() -> None:
        memory = FrontendMemory(1, arena, LIMIT, lambda: None, lambda: None)
        size = LIMIT // 8
        received = [reserved(memory, size) for _ in range(2)]
        assert memory.reserve_block(size) is None
        block, data = received[1]
        data[:] = b"x" * size
        tensor = Tensor("INPUT0", "UINT8", [size], block.data, block)
        offset = memory.encode_content(tensor, 8)
        assert isinstance(offset, int)
        found = memory.decode_tensor(m.WireTensor("INPUT0", "UINT8", [size], None, 1, offset, size))
        assert bytes(found.data) == b"x" * size
        exported.append(offset)
        del received[0], block, tensor, found
        # Neither a request that is complete nor one that has gone counts.
        received += [reserved(memory, size) for _ in range(2)]
        assert memory.reserve_block(size) is None

    exported: list[int] = []
    arena = create_arena_file("pbhost-test", LIMIT)
    asyncio.run(main())
    assert exported == [LIMIT // 8]
    os.close(arena)
