"""One `ModelStreamInfer` stream: the order of its responses, and its end."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from host.errors import ErrorCode, HostError, internal, unavailable
from host.frontends.grpc import infer_stream as grpc_stream
from host.frontends.grpc.contents import MIN_LARGE_INPUT_BYTES
from host.frontends.grpc.grpc_admin import admin_services
from host.frontends.grpc.grpc_application import GrpcApplication
from host.frontends.grpc.methods import Metadata
from host.frontends.grpc.service import GrpcService
from host.inference.call import Call
from host.inference.request import InferResponse
from tests.conftest import DEADLINE
from tests.unit.host.frontends.grpc.echo_core import EchoCore, echo


def message(model: str, request_id: str, answers: int = 1, **fields: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, id=request_id, **fields)
    request.inputs.add(name="INPUT0", datatype="INT32", shape=[1])
    request.raw_input_contents.append(answers.to_bytes(4, "little"))
    return request


class Conversation:
    """A client at the other end of an InferStream, and the core behind it; nothing is awaited.

    `room` is how many answers it takes before it has enough.
    """

    def __init__(self, close_on_error: bool = False, room: int = 1 << 30) -> None:
        self.core = EchoCore()
        self.service = GrpcService(self.core, admin_services(self.core))
        fields = [("triton_grpc_error", "true")] if close_on_error else []
        self.stream = self.service._open_stream(self, Metadata(fields))
        self.got: list[Any] = []
        self._ended = False
        self.error: Exception | None = None
        self.room = room
        self.more = False  # what the last answer came with
        self._unread: deque[bytes] = deque()
        self._reads = True

    def has_ended(self) -> bool:
        return self._ended

    # The interface that the stream needs from an engine.

    def write_message(self, message: bytes, more: bool) -> bool:
        assert not self._ended and self.room > 0
        self.got.append(pb.ModelStreamInferResponse.FromString(message))
        self.more = more
        self.room -= 1
        return self.room > 0

    def resume_reading(self) -> None:
        assert not self._reads
        self._reads = True
        self._read()

    def finish_stream(self, error: Exception | None = None, retry: int | None = None) -> None:
        assert not self._ended
        self._ended, self.error = True, error

    # The actions of a test.

    def say(self, *requests: Any) -> None:
        for request in requests:
            self.say_bytes(request.SerializeToString())

    def say_bytes(self, data: bytes) -> None:
        self._unread.append(data)
        self._read()

    def make_room(self, room: int = 1 << 30) -> None:
        self.room = room
        self.stream.resume_writing()

    def finish(self) -> list[Any]:
        """Half-close and take everything that has arrived."""
        self.stream.half_closed()
        assert self._ended and self.error is None
        assert not self.service.open_requests
        return self.take()

    def take(self) -> list[Any]:
        got, self.got = self.got, []
        return got

    def held(self, count: int) -> list[Call]:
        """Calls that the core holds: `count` of them."""
        assert self.core.held.qsize() == count
        return [self.core.held.get_nowait() for _ in range(count)]

    def _read(self) -> None:
        while self._unread and self._reads:
            self._reads = self.stream.message_received(self._unread.popleft())


def ids(messages: list[Any]) -> list[str]:
    return [message.infer_response.id for message in messages]


def final(message: Any) -> bool:
    return bool(message.infer_response.parameters["triton_final_response"].bool_param)


def test_ordinary_answers_leave_in_the_order_of_the_requests() -> None:
    client = Conversation()
    client.say(message("hold", "1"), message("echo", "2"), message("hold", "3"))
    client.say(message("missing", "4"), message("echo", "5"))
    first, third = client.held(2)
    third.respond(echo(third.request))
    assert not client.got
    first.respond(echo(first.request))
    got = client.finish()
    assert ids(got) == ["1", "2", "3", "4", "5"]
    assert all(final(m) for m in got if not m.error_message)


def test_decoupled_answers_do_not_wait_for_ordinary_ones() -> None:
    client = Conversation()
    client.say(message("hold", "1"), message("repeat", "2", answers=2))
    (first,) = client.held(1)
    got = client.take()
    assert ids(got) == ["2", "2"] and not any(final(m) for m in got)
    first.respond(echo(first.request))
    assert ids(client.finish()) == ["1"]


def test_an_empty_final_response_is_sent_if_requested() -> None:
    client = Conversation()
    request = message("repeat", "2", answers=1)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    client.say(request)
    first, last = client.finish()
    assert len(first.infer_response.outputs) == 1 and not final(first)
    assert first.infer_response.model_version == "1"
    assert not last.error_message and final(last)
    answer = last.infer_response
    assert (answer.id, answer.model_name, answer.model_version) == ("2", "repeat", "")
    assert not answer.outputs


def test_early_errors_carry_the_id_only_and_leave_the_stream_open() -> None:
    client = Conversation(close_on_error=True)
    invalid = message("echo", "2")
    invalid.inputs[0].datatype = "FP64"
    client.say(message("missing", "1"), invalid, message("echo", "3", model_version="x"))
    client.say_bytes(b"\xff\xff\xff")
    client.say(message("echo", "4"))
    *early, last = client.finish()
    assert ids(early) == ["1", "2", "3", ""]
    assert early[0].error_message == "Request for unknown model: 'missing' is not found"
    assert early[1].error_message == "[request id: 2] no FP64 here"
    for got in early:
        assert got.infer_response == pb.ModelInferResponse(id=got.infer_response.id)
    assert final(last) and not last.error_message


def test_an_unknown_model_is_reported_before_a_bad_parameter() -> None:
    client = Conversation()
    request = message("missing", "1")
    request.parameters["priority"].int64_param = -1
    client.say(request)
    (got,) = client.finish()
    assert got.error_message == "Request for unknown model: 'missing' is not found"


def test_an_error_response_names_the_model_as_the_request_did() -> None:
    client = Conversation()
    client.say(message("fail", "1", model_version="1"), message("echo", "2"))
    failed, answered = client.finish()
    answer = failed.infer_response
    assert failed.error_message == "the model said no"
    assert (answer.id, answer.model_name, answer.model_version) == ("1", "fail", "1")
    assert final(failed) and not answer.outputs
    assert ids([answered]) == ["2"]


def test_an_ordinary_model_without_a_response_is_an_error() -> None:
    client = Conversation()
    client.say(message("silent", "1"))
    (got,) = client.finish()
    assert got.error_message == "expected a single response, got 0"


def test_an_error_without_text_is_still_an_error_to_the_client() -> None:
    client = Conversation()
    client.say(message("hold", "1"))
    (call,) = client.held(1)
    call.fail(HostError(ErrorCode.CANCELLED, ""))
    (got,) = client.finish()
    assert got.error_message == "Cancelled"


def test_errors_can_end_the_stream() -> None:
    client = Conversation(close_on_error=True)
    client.say(message("hold", "1"), message("hold", "2"))
    first, second = client.held(2)
    second.respond(echo(second.request))
    first.fail(internal("the model said no"))
    assert client.has_ended() and str(client.error) == "the model said no"
    assert not client.got and not client.service.open_requests


def test_the_end_of_a_stream_cancels_its_open_requests() -> None:
    client = Conversation()
    client.say(message("hold", "1"), message("echo", "2"), message("hold", "3"))
    client.held(2)
    client.stream.cancel()
    assert {client.core.cancelled.get_nowait() for _ in range(2)} == {"1", "3"}
    assert not client.got and not client.has_ended() and not client.service.open_requests


def test_half_close_waits_for_open_requests() -> None:
    client = Conversation()
    client.say(message("hold", "1"))
    client.stream.half_closed()
    (call,) = client.held(1)
    assert not client.has_ended()
    call.respond(echo(call.request))
    assert ids(client.take()) == ["1"] and client.has_ended()


def test_a_stream_can_be_finished_after_its_open_requests() -> None:
    client = Conversation()
    client.say(message("hold", "1"))
    (call,) = client.held(1)
    client.stream.finish_after_open_requests(unavailable("bye"))
    assert not client.has_ended()
    call.respond(echo(call.request))
    assert ids(client.take()) == ["1"]
    assert client.has_ended() and str(client.error) == "bye"


def test_reading_pauses_at_the_limit_of_open_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "MAX_OPEN_REQUESTS", 2)
    client = Conversation()
    client.say(*(message("hold", str(number)) for number in range(4)))
    for call in client.held(2):
        call.respond(echo(call.request))
    for call in client.held(2):
        call.respond(echo(call.request))
    assert ids(client.finish()) == ["0", "1", "2", "3"]


def test_a_response_is_written_at_once_and_the_last_one_is_marked() -> None:
    client = Conversation()
    client.say(message("hold", "1"), message("hold", "2"))
    first, second = client.held(2)
    first.respond(echo(first.request))
    assert ids(client.take()) == ["1"] and client.more
    second.respond(echo(second.request))
    assert ids(client.take()) == ["2"] and not client.more


def test_requests_are_not_read_while_responses_are_not_taken() -> None:
    """However quickly the model answers."""
    client = Conversation(room=1)
    client.say(*(message("echo", str(number)) for number in range(3000)))
    assert ids(client.take()) == ["0"]
    assert len(client._unread) == 3000 - grpc_stream.MAX_OPEN_REQUESTS
    client.make_room(10)
    assert ids(client.take()) == [str(number) for number in range(1, 11)]
    assert len(client._unread) == 3000 - grpc_stream.MAX_OPEN_REQUESTS - 10
    client.make_room()
    assert ids(client.finish()) == [str(number) for number in range(11, 3000)]


def test_a_response_is_acknowledged_when_it_was_written() -> None:
    client = Conversation(room=1)
    client.say(message("hold", "1"))
    (call,) = client.held(1)
    taken: list[InferResponse] = []
    call.on_response_acknowledged = taken.append
    for _ in range(2):
        call.respond(echo(call.request), final=False)
    assert not taken and len(client.take()) == 1
    client.make_room(1)
    assert len(taken) == 1 and len(client.take()) == 1
    client.make_room()
    assert len(taken) == 2 and not client.got


def test_a_model_may_respond_again_when_its_last_response_was_taken() -> None:
    """Thousands of times: the call that sends one response never sends another one inside of it."""
    client = Conversation()
    client.say(message("hold", "1"))
    (call,) = client.held(1)
    left = 5000

    def send_next(response: InferResponse) -> None:
        nonlocal left
        left -= 1
        call.respond(response, final=not left)

    call.on_response_acknowledged = send_next
    call.respond(echo(call.request), final=False)
    assert len(client.finish()) == 5001


def test_cached_requests_keep_their_ids_order_and_options() -> None:
    client = Conversation()
    for number in range(6):
        request = message("repeat", f"r{number}", answers=number % 2, model_version="1")
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        client.say(request, message("hold", f"h{number}"), message("fail", f"f{number}"))
    last = [m.infer_response for m in client.take() if final(m)]
    assert [(m.id, m.model_name, m.model_version) for m in last] == [
        (f"r{number}", "repeat", "1") for number in range(6)
    ]
    calls = client.held(6)
    for call in reversed(calls):
        call.respond(echo(call.request))
    got = client.finish()
    assert ids(got) == [f"{kind}{number}" for number in range(6) for kind in "hf"]
    assert [m.error_message for m in got] == ["", "the model said no"] * 6


def test_a_cached_request_that_fails_early_still_has_its_id() -> None:
    client = Conversation()
    client.say(*(message("missing", str(number)) for number in range(5)))
    got = client.finish()
    assert ids(got) == [str(number) for number in range(5)]
    assert {m.error_message for m in got} == {"Request for unknown model: 'missing' is not found"}


def test_an_exception_in_the_engine_ends_the_stream_but_not_the_model() -> None:
    class Broken(Conversation):
        def write_message(self, message: bytes, more: bool) -> bool:
            raise RuntimeError("a defect")

    client = Broken()
    client.say(message("hold", "1"), message("hold", "2"))
    first, _ = client.held(2)
    first.respond(echo(first.request))
    assert client.has_ended() and str(client.error) == "a defect"
    assert client.core.cancelled.get_nowait() == "2"


def test_a_stream_that_is_cancelled_before_a_large_request_starts_leaves_no_coroutine() -> None:
    large = pb.ModelInferRequest(model_name="echo", id="1")
    contents = large.inputs.add(name="INPUT0", datatype="INT32", shape=[MIN_LARGE_INPUT_BYTES])
    contents.contents.int_contents.extend([1] * MIN_LARGE_INPUT_BYTES)

    async def say_and_cancel() -> None:
        client = Conversation()
        client.say(large)
        client.stream.cancel()
        await asyncio.sleep(0)  # a turn of the loop: the task ends
        assert not client.got and not client.service.open_requests

    asyncio.run(say_and_cancel())
    gc.collect()  # a coroutine that nothing awaited would warn here, which fails the test


def test_a_stream_ends_when_its_messages_are_cancelled() -> None:
    core = EchoCore()
    application = GrpcApplication(GrpcService(core, admin_services(core)))

    async def messages() -> AsyncIterator[bytes]:
        yield message("echo", "1").SerializeToString()
        raise asyncio.CancelledError

    async def read() -> list[bytes]:
        path = "/inference.GRPCInferenceService/ModelStreamInfer"
        return [answer async for answer in application.stream(path, messages())]

    with pytest.raises(HostError, match="the messages of the stream were cancelled") as caught:
        asyncio.run(asyncio.wait_for(read(), DEADLINE))
    assert caught.value.code is ErrorCode.UNAVAILABLE
