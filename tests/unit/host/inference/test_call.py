"""A call: awaited, iterated, subscribed to, cancelled and aborted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from host.errors import ErrorCode, HostError, internal, unavailable
from host.inference.call import Call, CallState, FailureReason
from host.inference.request import InferRequest, InferResponse
from tests.unit.host.call_parties import RecordingHolder, RecordingListener


def new_call() -> Call:
    return Call(InferRequest("m", [], id="7"))


def answer(text: str = "") -> InferResponse:
    return InferResponse("m", 1, text)


def cancelled(text: str) -> HostError:
    return HostError(ErrorCode.CANCELLED, text)


async def turn() -> None:
    """Runs all callbacks and tasks that are ready."""
    for _ in range(5):
        await asyncio.sleep(0)


class Recorder:
    """Records the callbacks of a call."""

    def __init__(self, call: Call) -> None:
        self.events: list[str] = []
        call.holder = RecordingHolder(on_cancel=lambda _: self.events.append("cancel"))
        call.listener = RecordingListener(lambda _: self.events.append("finish"))


def error_of(response: InferResponse | None) -> HostError | None:
    return None if response is None else response.error


async def single(call: Call) -> InferResponse:
    return await call


def test_awaiting_gives_the_only_response_whether_it_was_early_or_late() -> None:
    async def main() -> None:
        early = new_call()
        response = answer()
        early.respond(response)
        assert await early is response
        late = new_call()
        task = asyncio.create_task(single(late))
        await turn()
        assert not task.done()
        late.respond(response)
        assert await task is response

    asyncio.run(main())


def test_awaiting_raises_the_error_of_the_response() -> None:
    async def main() -> None:
        call = new_call()
        error = unavailable("gone")
        call.fail(error)
        with pytest.raises(HostError) as caught:
            await call
        assert caught.value is error
        assert call.failed

    asyncio.run(main())


@pytest.mark.parametrize(("responses", "count"), [([None], 0), ([answer(), answer()], 2)])
def test_awaiting_a_call_without_exactly_one_response_is_an_error(
    responses: list[InferResponse | None], count: int
) -> None:
    async def main() -> None:
        call = new_call()
        for number, response in enumerate(responses):
            call.respond(response, final=number == len(responses) - 1)
        with pytest.raises(HostError, match=f"expected a single response, got {count}") as caught:
            await call
        assert caught.value.code is ErrorCode.INTERNAL

    asyncio.run(main())


def test_awaiting_a_stream_cancels_it() -> None:
    async def main() -> None:
        call = new_call()
        recorder = Recorder(call)
        call.respond(answer(), final=False)
        with pytest.raises(HostError, match="expected a single response"):
            await call
        assert call.cancelled
        assert sorted(recorder.events) == ["cancel", "finish"]

    asyncio.run(main())


def test_a_cancelled_waiter_cancels_the_call() -> None:
    async def main() -> None:
        call = new_call()
        recorder = Recorder(call)
        task = asyncio.create_task(single(call))
        await turn()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.cancelled
        assert call.finished
        assert sorted(recorder.events) == ["cancel", "finish"]

    asyncio.run(main())


async def collect(call: Call) -> list[InferResponse]:
    return [response async for response in call]


def test_iterating_gives_every_response_in_order() -> None:
    async def main() -> None:
        call = new_call()
        responses = [answer(str(number)) for number in range(5)]
        call.respond(responses[0], final=False)
        call.respond(responses[1], final=False)
        task = asyncio.create_task(collect(call))
        await turn()
        for response in responses[2:4]:
            call.respond(response, final=False)
            await turn()
        call.respond(responses[4], final=True)
        assert await task == responses
        assert not call.cancelled

    asyncio.run(main())


def test_iterating_ends_with_a_bare_completion_and_shows_errors_as_responses() -> None:
    async def main() -> None:
        call = new_call()
        broken = InferResponse("m", 1, error=internal("this one"))
        call.respond(answer(), final=False)
        call.respond(broken, final=False)
        call.respond(None, final=True)
        collected = await collect(call)
        assert collected[1] is broken
        assert len(collected) == 2
        assert call.failed
        assert not call.cancelled

    asyncio.run(main())


def test_leaving_an_iteration_early_cancels_the_call() -> None:
    async def main() -> None:
        call = new_call()
        recorder = Recorder(call)
        call.respond(answer(), final=False)
        iterator = call.__aiter__()
        await iterator.__anext__()
        assert recorder.events == []
        await iterator.aclose()
        assert call.cancelled
        assert recorder.events == ["cancel", "finish"]

    asyncio.run(main())


def test_a_cancelled_iteration_cancels_the_call() -> None:
    async def main() -> None:
        call = new_call()
        task = asyncio.create_task(collect(call))
        await turn()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.cancelled

    asyncio.run(main())


def test_subscriber_gets_earlier_and_later_responses() -> None:
    call = new_call()
    seen: list[tuple[Any, bool]] = []
    first, second, third = answer("1"), answer("2"), answer("3")
    call.respond(first, final=False)
    call.respond(second, final=False)
    call.subscribe(lambda response, final: seen.append((response, final)))
    call.respond(third)
    assert seen == [(first, False), (second, False), (third, True)]


def test_responses_after_the_final_one_are_dropped() -> None:
    call = new_call()
    recorder = Recorder(call)
    seen: list[InferResponse | None] = []
    call.subscribe(lambda response, final: seen.append(response))
    response = answer()
    call.respond(response)
    call.respond(answer("late"))
    call.fail(internal("late"))
    call.cancel()
    assert seen == [response]
    assert not call.failed
    assert not call.cancelled
    assert recorder.events == ["finish"]


def test_cancel_calls_the_owner_once_and_ends_the_call() -> None:
    async def main() -> None:
        call = new_call()
        recorder = Recorder(call)
        call.cancel()
        call.cancel()
        assert recorder.events == ["cancel", "finish"]
        with pytest.raises(HostError) as caught:
            await call
        assert caught.value.code is ErrorCode.CANCELLED

    asyncio.run(main())


def test_abort_ends_the_call_with_the_given_error() -> None:
    async def main() -> None:
        call = new_call()
        recorder = Recorder(call)
        call.abort(unavailable("the server stops"))
        assert recorder.events == ["cancel", "finish"]
        with pytest.raises(HostError, match="the server stops"):
            await call

    asyncio.run(main())


def test_responses_after_requested_cancellation_arrive() -> None:
    call = new_call()
    model = RecordingHolder(model_has_calls=True)
    seen: list[tuple[HostError | None, bool]] = []
    call.subscribe(lambda response, final: seen.append((error_of(response), final)))
    call.holder = model
    for _ in range(2):
        call.request_cancellation(cancelled("enough"))
    assert model.cancelled == [call]
    call.respond(answer(), False)
    call.respond(answer())
    assert seen == [(None, False), (None, True)]


@pytest.mark.parametrize("waits", [True, False])
def test_requested_cancellation_ends_a_call_no_model_has(waits: bool) -> None:
    call = new_call()
    recorder = Recorder(call)
    seen: list[HostError | None] = []
    call.subscribe(lambda response, _: seen.append(error_of(response)))
    if not waits:
        call.holder = None
    call.request_cancellation(cancelled("enough"))
    call.request_cancellation(cancelled("more than enough"))
    assert recorder.events == ["cancel"] * waits + ["finish"]
    assert [error.message for error in seen if error] == ["enough"]
    assert call.failure_reason is FailureReason.CANCELED


def test_call_with_requested_cancellation_can_be_cancelled() -> None:
    call = new_call()
    seen: list[HostError | None] = []
    call.subscribe(lambda response, _: seen.append(error_of(response)))
    call.holder = RecordingHolder(model_has_calls=True)
    call.request_cancellation(cancelled("enough"))
    call.abort(cancelled("the asker has died"))
    assert [error.message for error in seen if error] == ["the asker has died"]


def test_response_from_the_cancel_callback_wins() -> None:
    call = new_call()
    seen: list[HostError | None] = []
    call.subscribe(lambda response, _: seen.append(response.error if response else None))
    call.holder = RecordingHolder(on_cancel=lambda which: which.fail(internal("first")))
    call.cancel()
    assert [error.message for error in seen if error] == ["first"]


def test_error_response_carries_model_and_request_id() -> None:
    call = new_call()
    seen: list[InferResponse | None] = []
    call.subscribe(lambda response, _: seen.append(response))
    call.fail(internal("x"))
    response = seen[0]
    assert response is not None
    assert (response.model_name, response.model_version, response.id) == ("m", -1, "7")
    assert response.outputs == []


def test_state_tells_how_far_a_call_has_come() -> None:
    states: list[CallState] = []
    call = new_call()
    call.listener = RecordingListener(lambda _: states.append(call.state))
    call.holder = RecordingHolder(True, on_cancel=lambda _: states.append(call.state))
    steps = [(call.state, call.ended)]
    call.request_cancellation(cancelled("enough"))
    steps.append((call.state, call.ended))
    call.cancel()
    assert steps == [(CallState.RUNNING, False), (CallState.CANCELLING, False)]
    assert states == [CallState.CANCELLING, CallState.ABORTED, CallState.FINISHED]
    assert call.ended


def test_model_is_told_of_each_response_before_the_caller() -> None:
    order: list[str] = []

    class Model(RecordingListener):
        def call_responded(self, call: Call, response: InferResponse) -> None:
            order.append(f"model {response.id} {call.responded}")

    call = new_call()
    call.listener = Model(lambda _: order.append("finished"))
    call.subscribe(lambda response, _: order.append(f"caller {response and response.id}"))
    call.respond(answer("1"), final=False)
    call.respond(answer("2"), final=False)
    call.respond(None)
    assert order == [
        *("model 1 False", "caller 1", "model 2 True", "caller 2", "finished", "caller None"),
    ]


class Subscriber:
    """A caller that raises `failures` exceptions, and records what it gets after them."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.got: list[tuple[InferResponse | None, bool]] = []

    def __call__(self, response: InferResponse | None, final: bool) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a defect")
        self.got.append((response, final))


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("answered", [answer(), None])
def test_caller_that_cannot_handle_a_response_gets_an_internal_error_as_the_last_one(
    final: bool, answered: InferResponse | None, caplog: pytest.LogCaptureFixture
) -> None:
    call = new_call()
    recorder, caller = Recorder(call), Subscriber(1)
    call.subscribe(caller)
    call.respond(answered, final)
    ((response, was_final),) = caller.got
    error = error_of(response)
    assert was_final and error is not None and call.finished
    assert (error.code, error.message) == (ErrorCode.INTERNAL, "unexpected failure: RuntimeError")
    assert recorder.events == (["finish"] if final else ["cancel", "finish"])
    (record,) = caplog.records
    assert record.getMessage() == "unexpected failure of a request to model 'm'"
    assert record.exc_info is not None
    call.respond(answer())
    assert len(caller.got) == 1


def test_caller_of_a_unary_call_that_cannot_handle_its_response_gets_an_internal_error() -> None:
    got: list[InferResponse | HostError] = []

    def encode(result: InferResponse | HostError) -> None:
        if isinstance(result, InferResponse):
            raise RuntimeError("a defect")
        got.append(result)

    call = new_call()
    call.subscribe_single(encode)
    call.respond(answer())
    (error,) = got
    assert isinstance(error, HostError) and error.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("method", ["call_responded", "call_finished"])
def test_model_that_cannot_count_a_response_ends_its_call_with_an_internal_error(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    call = new_call()
    caller = Subscriber(0)
    call.listener = RecordingListener()
    monkeypatch.setattr(call.listener, method, fail)
    call.subscribe(caller)
    call.respond(answer())
    ((response, final),) = caller.got
    error = error_of(response)
    assert final and call.finished and error is not None and error.code is ErrorCode.INTERNAL


def test_cancellation_that_fails_ends_the_call_all_the_same() -> None:
    def fail(_: Call) -> None:
        raise RuntimeError("a defect")

    call, caller = new_call(), Subscriber(0)
    call.holder = RecordingHolder(on_cancel=fail)
    call.subscribe(caller)
    call.abort(internal("over"))
    ((response, final),) = caller.got
    error = error_of(response)
    assert final and error is not None and error.message == "over"
