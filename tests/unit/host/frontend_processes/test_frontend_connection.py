"""The core's connection to one frontend process."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from host.access.api_keys import ApiKeys
from host.errors import ErrorCode
from host.frontend_processes import frontend_messages as m
from host.frontend_processes.frontend_connection import FrontendConnection
from host.frontend_processes.frontend_link import BudgetFile, MessageLink
from host.frontends.grpc.grpc_admin import admin_services
from host.frontends.http1.asgi import Message, Receive, Send
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, Tensor
from host.instances.arenas import Arenas
from host.models.registry import NotServedError
from stub.wire.arena import Block
from stub.wire.messages import BlockRelease
from tests.unit.host.frontends.grpc.echo_core import EchoCore

LIMIT = 1 << 24


async def app(scope: Message, receive: Receive, send: Send) -> None:
    """Answers with the body; on the path /parts with two parts that are sent at once."""
    if scope["raw_path"] == b"/parts":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        part: Message = {"type": "http.response.body", "body": b"x", "more_body": True}
        await asyncio.gather(send(part), send(part))
        await send({"type": "http.response.body", "body": b""})
        return
    body, more = b"", True
    while more:
        part = await receive()
        body += part["body"]
        more = part["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


class Peer:
    """A frontend process of the test: it sends what it is told to, and keeps what it gets."""

    def __init__(self, api_keys: ApiKeys | None = None) -> None:
        self.core = EchoCore()
        self.arenas = Arenas(LIMIT)
        self.faults: list[Exception] = []
        self.received: list[m.ToFrontend] = []
        self.changed = asyncio.Event()
        self.connection = FrontendConnection(
            "pbhost-frontend 0",
            self.core,
            admin_services(self.core),
            app,
            api_keys,
            self.arenas,
            lambda: None,
            self._on_fault,
        )
        self.budget = BudgetFile(1)
        self.spawn = self.connection.spawn_arguments(0, -1, -1, self.budget)
        self.link = MessageLink(
            self.spawn.rings,
            (self.spawn.to_frontend, self.spawn.to_core),
            False,
            self._on_frames,
            self._on_fault,
            lambda: None,
        )

    def _on_fault(self, error: Exception) -> None:
        self.faults.append(error)
        self.changed.set()

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self.received += m.decode_to_frontend(frame)
        self.changed.set()

    def send(self, *messages: m.ToCore) -> None:
        for message in messages:
            self.link.send(message)
        self.link.flush()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)

    def close(self) -> None:
        self.link.close()
        self.connection.close()
        self.budget.close()
        self.arenas.close()


def run(test: Callable[[Peer], Coroutine[Any, Any, None]], api_keys: ApiKeys | None = None) -> None:
    async def main() -> None:
        peer = Peer(api_keys)
        try:
            await test(peer)
        finally:
            peer.close()

    asyncio.run(main())


def tensor(**fields: Any) -> m.WireTensor:
    return m.WireTensor("INPUT0", "INT32", [1], **fields)


def infer(number: int, model: str = "echo", **fields: Any) -> m.Infer:
    return m.Infer(number, model, [tensor(data=b"1234")], **fields)


def test_a_request_is_answered() -> None:
    async def test(peer: Peer) -> None:
        peer.send(infer(1, id="one"), infer(2, "missing"))
        await peer.wait_until(lambda: len(peer.received) == 2)
        first, second = peer.received
        assert isinstance(first, m.Response) and isinstance(second, m.Response)
        assert first.response is not None and first.response.id == "one"
        assert first.response.outputs[0].data == b"1234"
        assert second.response is not None and second.response.error is not None
        assert second.response.error.code == "Not found"

    run(test)


def test_a_request_is_repeated_with_another_id_and_other_tensors() -> None:
    async def test(peer: Peer) -> None:
        first = infer(1, "hold", id="one", template=7, priority=3, outputs=["OUTPUT0"])
        peer.send(first, m.RepeatedInfer(2, 7, [b"5678"], "two"), m.RepeatedInfer(3, 7, [b"4321"]))
        calls = [await asyncio.to_thread(peer.core.held.get, timeout=60) for _ in range(3)]
        one, two, three = (call.request for call in calls)
        assert [one.id, two.id, three.id] == ["one", "two", ""]
        contents = [request.inputs[0].data for request in (one, two, three)]
        assert contents == [b"1234", b"5678", b"4321"]
        assert two.shape is three.shape is not None
        for request in (two, three):
            request.id, request.inputs, request.shape = "one", one.inputs, None
            assert request == one

    run(test)


def test_a_response_that_cannot_be_passed_on_ends_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For want of a descriptor, or since its message cannot be encoded; nothing stays exported."""
    caplog.set_level(logging.CRITICAL, "pbhost")  # a record would keep the response alive

    async def test(peer: Peer) -> None:
        released: list[int] = []

        def exported(offset: int) -> Tensor:
            block = Block(0, offset, 4, memoryview(b"1234"), lambda *_: released.append(offset))
            return Tensor("FIRST", "INT32", [1], block.data, block)

        async def respond(number: int, *outputs: Tensor, **parameters: int) -> None:
            peer.send(infer(number, "hold"))
            call = await asyncio.to_thread(peer.core.held.get, timeout=60)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                call.respond(InferResponse("hold", 1, "", list(outputs), dict(parameters)))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

        file = peer.arenas.create_arena()
        block = file.block(0, 4)
        in_new_arena = Tensor("SECOND", "INT32", [1], block.data, block)
        await respond(1, exported(0), in_new_arena)
        await respond(2, exported(64), huge=1 << 70)
        await peer.wait_until(lambda: len(peer.received) == 2)
        first, second = (one.response for one in peer.received if isinstance(one, m.Response))
        assert first is not None and first.error is not None
        assert first.error.message == "unexpected failure: OSError"
        assert second is not None and second.error is not None
        assert "'hold' cannot be sent" in second.error.message
        assert released == [0, 64]

    run(test)


def test_long_and_many_frames_arrive_in_order() -> None:
    async def test(peer: Peer) -> None:
        long = "x" * 300_000
        count = 400
        for number in range(1, count + 1):
            text = long if number % 50 == 0 else "y" * 3000
            peer.send(infer(number, parameters={"text": text}))
        await peer.wait_until(lambda: len(peer.received) == count)
        numbers = [one.number for one in peer.received if isinstance(one, m.Response)]
        assert numbers == list(range(1, count + 1))
        last = peer.received[-1]
        assert isinstance(last, m.Response) and last.response is not None
        assert last.response.parameters == {"text": long}
        assert not peer.faults

    run(test)


def test_an_http_request_is_passed_on_in_parts() -> None:
    async def test(peer: Peer) -> None:
        peer.send(m.OpenExchange(1, "POST", b"/v2", b"", [], None))
        sent = 0
        while True:
            await peer.wait_until(lambda: bool(peer.received))
            command = peer.received.pop(0)
            if isinstance(command, m.ReceiveBody):
                sent += 1
                peer.send(m.ExchangeBody(1, b"%d," % sent, sent < 3))
            elif isinstance(command, m.EndExchange):
                break
            else:
                if isinstance(command, m.SendBody):
                    assert command.body == b"1,2,3,"
                peer.send(m.ExchangeSent(1))
        assert sent == 3

    run(test)


def test_an_http_request_ends_although_it_is_cancelled_before_it_starts() -> None:
    async def test(peer: Peer) -> None:
        peer.send(m.OpenExchange(1, "GET", b"/v2", b"", [], None), m.Cancel(1))
        await peer.wait_until(lambda: bool(peer.received))
        assert peer.received == [m.EndExchange(1)]

    run(test)


def test_parts_that_are_sent_at_once_are_each_acknowledged() -> None:
    async def test(peer: Peer) -> None:
        peer.send(m.OpenExchange(1, "GET", b"/parts", b"", [], None))
        while True:
            await peer.wait_until(lambda: bool(peer.received))
            if isinstance(peer.received.pop(0), m.EndExchange):
                break
            peer.send(m.ExchangeSent(1))

    run(test)


def test_the_end_of_the_process_cancels_its_requests() -> None:
    async def test(peer: Peer) -> None:
        peer.send(infer(1, "hold", id="held"))
        await asyncio.to_thread(peer.core.held.get, timeout=60)
        peer.connection.close()
        assert peer.core.cancelled.get_nowait() == "held"

    run(test)


@pytest.mark.parametrize(
    "lie",
    [
        [m.Infer(1, "echo", [tensor(arena=0, offset=0, size=4)])],  # an arena of the core
        [m.Infer(1, "echo", [tensor(arena=1, offset=1 << 40, size=4)])],  # outside of its own
        [m.Infer(1, "echo", [tensor(arena=1, offset=-4, size=4)])],
        [infer(1, "hold"), infer(1, "hold")],
        [m.CallRpc(1, "inference.GRPCInferenceService", "Missing", b"")],
        [BlockRelease([(0, 0, 1)])],
        [m.OpenExchange(1, "POST", b"/", b"", [], None)] * 2,
        [m.RepeatedInfer(1, 1, [b"1234"])],  # of a request that it has not sent
        [infer(1, template=1), m.RepeatedInfer(2, 1, [b"12345"])],
        [infer(1, template=1), m.RepeatedInfer(2, 1, [1 << 40])],  # outside of its arena
        [infer(1, template=1), m.RepeatedInfer(2, 1, [])],
        [infer(1, "hold", template=1), m.RepeatedInfer(1, 1, [b"1234"])],
        [infer(1, template=1 << 20)],
        [infer(1, template=1, parameters={"one": 1})],
    ],
    ids=[
        *("arena", "outside", "negative", "number", "method", "release", "exchange"),
        *("template", "size", "place", "count", "repeated number", "many", "parameters"),
    ],
)
def test_a_process_that_lies_is_ended(lie: list[m.ToCore]) -> None:
    async def test(peer: Peer) -> None:
        peer.send(*lie)
        await peer.wait_until(lambda: bool(peer.faults))
        assert len(peer.faults) == 1

    run(test)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91\x91\xa4nope", b"\x91" + b"\x91" * 2000])
def test_a_frame_that_is_no_frame_ends_the_process(frame: bytes) -> None:
    async def test(peer: Peer) -> None:
        peer.link.sender.send(frame)
        await peer.wait_until(lambda: bool(peer.faults))

    run(test)


def test_a_defect_after_the_wait_for_a_model_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(request: InferRequest, start: Callable[[], Call]) -> Call:
        raise RuntimeError("a bug in the core")

    def refuse(request: InferRequest, unary: bool = False) -> Call:
        raise NotServedError(ErrorCode.UNAVAILABLE, "not loaded")

    async def test(peer: Peer) -> None:
        monkeypatch.setattr(EchoCore, "loads_on_demand", True)
        monkeypatch.setattr(peer.core, "infer", refuse)
        monkeypatch.setattr(peer.core, "start_when_loaded", fail)
        peer.send(infer(1))
        await peer.wait_until(lambda: bool(peer.received))
        (response,) = peer.received
        assert isinstance(response, m.Response) and response.refused
        assert response.response is not None and response.response.error is not None
        assert response.response.error.message == "unexpected failure: RuntimeError"

    run(test)


def test_a_request_that_waits_and_one_that_has_waited_count_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, path = b"Bearer some-key-of-it", tmp_path / "keys"
    path.write_text("it some-key-of-it rate=0.001 burst=2\n")
    keys = ApiKeys(str(path), ["inference"], frozenset({"inference"}))
    client = keys.authorize("inference", header)

    def refuse(request: InferRequest, unary: bool = False) -> Call:
        raise NotServedError(ErrorCode.UNAVAILABLE, "not loaded")

    async def test(peer: Peer) -> None:
        loaded = asyncio.Event()

        async def wait(request: InferRequest, start: Callable[[], Any]) -> Any:
            await loaded.wait()
            return start()

        monkeypatch.setattr(EchoCore, "loads_on_demand", True)
        monkeypatch.setattr(peer.core, "infer", refuse)
        monkeypatch.setattr(peer.core, "start_when_loaded", wait)
        peer.send(m.AwaitModel(1, "hold", -1, 0, 0, header))
        peer.send(*(infer(number, "hold", authorization=header) for number in (2, 3)))
        await peer.wait_until(lambda: bool(peer.received))  # the third is above the limit
        assert client.in_progress == 2 and client.started == 0
        monkeypatch.undo()
        loaded.set()
        await peer.wait_until(lambda: len(peer.received) == 2)  # the model is there
        assert isinstance(peer.received[1], m.Reply) and peer.received[1].error is None
        assert client.in_progress == 2 and client.started == 1
        peer.send(infer(4, "hold", authorization=header, admission=1), m.Cancel(1))
        peer.send(infer(5, "hold", authorization=header))
        await peer.wait_until(lambda: len(peer.received) == 3)
        assert client.in_progress == client.started == 2

    run(test, keys)


def test_the_end_of_the_process_ends_what_it_has_been_admitted(tmp_path: Path) -> None:
    header, path = b"Bearer some-key-of-it", tmp_path / "keys"
    path.write_text("it some-key-of-it rate=0.001 burst=2\n")
    keys = ApiKeys(str(path), ["inference"], frozenset({"inference"}))
    client = keys.authorize("inference", header)

    async def test(peer: Peer) -> None:
        peer.send(*(m.AwaitModel(number, "hold", -1, 0, 0, header) for number in (1, 2)))
        await peer.wait_until(lambda: len(peer.received) == 2)
        assert client.in_progress == 2
        peer.connection.close()
        assert client.in_progress == 0
        for _ in range(2):
            client.admit()

    run(test, keys)
