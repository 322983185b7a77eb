"""What leaves a stream, and in which order, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_echo_core import EchoCore, echo
from tritonclient.grpc import service_pb2 as pb

from host.errors import ErrorCode, HostError, internal, unavailable
from host.frontends import grpc_stream
from host.frontends.grpc_methods import NO_METADATA
from host.frontends.grpc_service import GrpcService
from host.frontends.grpc_stream import InferStream
from host.inference import Call
from tests.conftest import DEADLINE


def message(model: str, request_id: str, answers: int = 1, **fields: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, id=request_id, **fields)
    request.inputs.add(name="INPUT0", datatype="INT32", shape=[1])
    request.raw_input_contents.append(answers.to_bytes(4, "little"))
    return request


class Conversation:
    """A client at the other end of an InferStream, and the core behind it."""

    def __init__(self, errors_end_it: bool = False) -> None:
        self.core = EchoCore()
        self.stream = InferStream(GrpcService(self.core), self._send, NO_METADATA, errors_end_it)
        self.got: asyncio.Queue[Any] = asyncio.Queue()
        self._requests: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.running = asyncio.ensure_future(self.stream.run(self._read()))

    def say(self, *requests: Any) -> None:
        for request in requests:
            self._requests.put_nowait(request.SerializeToString())

    def say_bytes(self, data: bytes) -> None:
        self._requests.put_nowait(data)

    def half_close(self) -> None:
        self._requests.put_nowait(None)

    def break_off(self, error: Exception) -> None:
        self._requests.put_nowait(error)

    async def finish(self) -> list[Any]:
        """Half-close and take everything that is still to come."""
        self.half_close()
        await asyncio.wait_for(self.running, DEADLINE)
        return [self.got.get_nowait() for _ in range(self.got.qsize())]

    async def held(self, count: int) -> list[Call]:
        """Calls that the core holds, once there are `count` of them."""
        await settle()
        assert self.core.held.qsize() == count
        return [self.core.held.get_nowait() for _ in range(count)]

    async def _send(self, data: bytes) -> None:
        self.got.put_nowait(pb.ModelStreamInferResponse.FromString(data))

    async def _read(self) -> AsyncIterator[bytes]:
        while (data := await self._requests.get()) is not None:
            if isinstance(data, Exception):
                raise data
            yield data


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


def ids(messages: list[Any]) -> list[str]:
    return [message.infer_response.id for message in messages]


def final(message: Any) -> bool:
    return bool(message.infer_response.parameters["triton_final_response"].bool_param)


def test_ordinary_answers_leave_in_the_order_of_the_requests() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("hold", "1"), message("echo", "2"), message("hold", "3"))
        client.say(message("missing", "4"), message("echo", "5"))
        first, third = await client.held(2)
        third.respond(echo(third.request))
        await settle()
        assert client.got.empty()
        first.respond(echo(first.request))
        got = await client.finish()
        assert ids(got) == ["1", "2", "3", "4", "5"]
        assert all(final(m) for m in got if not m.error_message)

    asyncio.run(run())


def test_decoupled_answers_do_not_wait_for_ordinary_ones() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("hold", "1"), message("repeat", "2", answers=2))
        (first,) = await client.held(1)
        got = [client.got.get_nowait() for _ in range(client.got.qsize())]
        assert ids(got) == ["2", "2"] and not any(final(m) for m in got)
        first.respond(echo(first.request))
        assert ids(await client.finish()) == ["1"]

    asyncio.run(run())


def test_an_empty_final_response_comes_if_asked_for() -> None:
    async def run() -> None:
        client = Conversation()
        request = message("repeat", "2", answers=1)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        client.say(request)
        first, last = await client.finish()
        assert len(first.infer_response.outputs) == 1 and not final(first)
        assert first.infer_response.model_version == "1"
        assert not last.error_message and final(last)
        answer = last.infer_response
        assert (answer.id, answer.model_name, answer.model_version) == ("2", "repeat", "")
        assert not answer.outputs

    asyncio.run(run())


def test_early_errors_carry_the_id_only_and_leave_the_stream_open() -> None:
    async def run() -> None:
        client = Conversation(errors_end_it=True)
        invalid = message("echo", "2")
        invalid.inputs[0].datatype = "FP64"
        client.say(message("missing", "1"), invalid, message("echo", "3", model_version="x"))
        client.say_bytes(b"\xff\xff\xff")
        client.say(message("echo", "4"))
        *early, last = await client.finish()
        assert ids(early) == ["1", "2", "3", ""]
        assert early[0].error_message == "Request for unknown model: 'missing' is not found"
        assert early[1].error_message == "[request id: 2] no FP64 here"
        for got in early:
            assert got.infer_response == pb.ModelInferResponse(id=got.infer_response.id)
        assert final(last) and not last.error_message

    asyncio.run(run())


def test_an_unknown_model_is_reported_before_a_bad_parameter() -> None:
    async def run() -> None:
        client = Conversation()
        request = message("missing", "1")
        request.parameters["priority"].int64_param = -1
        client.say(request)
        (got,) = await client.finish()
        assert got.error_message == "Request for unknown model: 'missing' is not found"

    asyncio.run(run())


def test_an_error_response_names_the_model_as_the_request_did() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("fail", "1", model_version="1"), message("echo", "2"))
        failed, answered = await client.finish()
        answer = failed.infer_response
        assert failed.error_message == "the model said no"
        assert (answer.id, answer.model_name, answer.model_version) == ("1", "fail", "1")
        assert final(failed) and not answer.outputs
        assert ids([answered]) == ["2"]

    asyncio.run(run())


def test_an_ordinary_model_without_a_response_is_an_error() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("silent", "1"))
        (got,) = await client.finish()
        assert got.error_message == "expected a single response, got 0"

    asyncio.run(run())


def test_an_error_without_text_is_still_an_error_to_the_client() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("hold", "1"))
        (call,) = await client.held(1)
        call.fail(HostError(ErrorCode.CANCELLED, ""))
        (got,) = await client.finish()
        assert got.error_message == "Cancelled"

    asyncio.run(run())


def test_errors_can_end_the_stream() -> None:
    async def run() -> None:
        client = Conversation(errors_end_it=True)
        client.say(message("hold", "1"), message("hold", "2"))
        first, second = await client.held(2)
        second.respond(echo(second.request))
        first.fail(internal("the model said no"))
        with pytest.raises(HostError, match="the model said no"):
            await asyncio.wait_for(client.running, DEADLINE)
        assert client.got.empty()

    asyncio.run(run())


def test_the_end_of_a_stream_cancels_what_is_open() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("hold", "1"), message("echo", "2"), message("hold", "3"))
        await client.held(2)
        client.running.cancel()
        await asyncio.wait([client.running])
        assert {client.core.cancelled.get_nowait() for _ in range(2)} == {"1", "3"}
        assert client.got.empty()

    asyncio.run(run())


def test_a_failing_reader_ends_the_stream_at_once() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("hold", "1"))
        client.break_off(ConnectionError("gone"))
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(client.running, DEADLINE)
        assert client.core.cancelled.get_nowait() == "1"

    asyncio.run(run())


def test_half_close_waits_for_what_is_open() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("hold", "1"))
        client.half_close()
        (call,) = await client.held(1)
        assert not client.running.done()
        call.respond(echo(call.request))
        assert ids(await client.finish()) == ["1"]

    asyncio.run(run())


def test_a_stream_can_be_ended_once_it_is_idle() -> None:
    async def run() -> None:
        client = Conversation()
        client.say(message("hold", "1"))
        (call,) = await client.held(1)
        client.stream.end(unavailable("bye"))
        await settle()
        assert not client.running.done()
        call.respond(echo(call.request))
        with pytest.raises(HostError, match="bye"):
            await asyncio.wait_for(client.running, DEADLINE)
        assert ids([client.got.get_nowait()]) == ["1"]

    asyncio.run(run())


def test_a_stream_reads_no_further_while_too_much_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "OPEN_REQUESTS", 2)

    async def run() -> None:
        client = Conversation()
        client.say(*(message("hold", str(number)) for number in range(4)))
        for call in await client.held(2):
            call.respond(echo(call.request))
        for call in await client.held(2):
            call.respond(echo(call.request))
        assert ids(await client.finish()) == ["0", "1", "2", "3"]

    asyncio.run(run())
