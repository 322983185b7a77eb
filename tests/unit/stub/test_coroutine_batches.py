"""Batches of an `async def execute`: responses, overlap, exceptions, cancellation."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import pb_utils
from stub.wire import messages as m
from tests.conftest import DEADLINE
from tests.unit.stub.host_peer import (
    FAILED,
    StartStub,
    echo,
    error_text,
    input_value,
    output_value,
    output_values,
    response,
    wire_request,
)

Requests = list[pb_utils.InferenceRequest]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Gate:
    """A point in the coroutines of batches at which they wait for the test."""

    def __init__(self) -> None:
        self._reached: dict[int, threading.Event] = {}
        self._open: dict[int, asyncio.Event] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _arrived(self, value: int) -> threading.Event:
        with self._lock:
            return self._reached.setdefault(value, threading.Event())

    async def wait(self, value: int) -> None:
        """Waits, as the coroutine of the batch with this value."""
        self._loop = asyncio.get_running_loop()
        self._open[value] = asyncio.Event()
        self._arrived(value).set()
        await self._open[value].wait()

    def wait_until_reached(self, value: int) -> None:
        """Waits until that coroutine is at the gate."""
        assert self._arrived(value).wait(DEADLINE)

    def open(self, value: int) -> None:
        """Lets that coroutine continue."""
        self.wait_until_reached(value)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._open[value].set)


def test_each_request_of_a_coroutine_gets_its_response_in_order(start_stub: StartStub) -> None:
    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        await asyncio.gather(*(asyncio.to_thread(input_value, request) for request in requests))
        return [echo(request) for request in requests]

    host = start_stub(execute)
    responses, done = host.run_batch(*map(wire_request, (7, 8, 9)))
    assert list(output_values(responses).items()) == [(0, 7), (1, 8), (2, 9)]
    assert all(message.final for message in responses)
    assert (done.failure, done.deferred) == (None, ())


@pytest.mark.parametrize("concurrent", [1, 2])
@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_exception_of_a_coroutine_fails_every_request_and_the_next_batch_runs(
    start_stub: StartStub, concurrent: int, kind: type[BaseException]
) -> None:
    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        if input_value(requests[0]) == 0:
            raise kind("out of luck")
        return [echo(request) for request in requests]

    host = start_stub(execute, max_concurrent_batches=concurrent)
    responses, done = host.run_batch(*map(wire_request, (0, 1)))
    assert [message.index for message in responses] == [0, 1]
    for message in responses:
        assert error_text(message).startswith(f"{FAILED}{kind.__name__}: out of luck\n\nAt:\n")
        assert done.failure == error_text(message)
    assert output_values(host.run_batch(wire_request(2))[0]) == {0: 2}


@pytest.mark.parametrize("concurrent", [1, 2])
@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ((), "Expected a list in the execute return, found type '<class 'tuple'>'."),
        (
            [response(1)],
            (
                "Number of InferenceResponse objects do not match the number of InferenceRequest"
                " objects. InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1\n"
            ),
        ),
    ],
)
def test_a_wrong_return_value_of_a_coroutine_fails_every_request(
    start_stub: StartStub, concurrent: int, returned: object, text: str
) -> None:
    async def execute(requests: Requests) -> object:
        return returned

    host = start_stub(execute, max_concurrent_batches=concurrent)
    responses, _ = host.run_batch(*map(wire_request, (0, 1)))
    assert [error_text(message) for message in responses] == [FAILED + text, FAILED + text]


def test_coroutines_of_several_batches_overlap_up_to_the_limit(start_stub: StartStub) -> None:
    gate = Gate()

    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        await gate.wait(input_value(requests[0]))
        return [echo(request) for request in requests]

    host = start_stub(execute, max_concurrent_batches=2)
    host.send_batch(wire_request(1))
    assert host.receive_frame() == [m.InstanceReleased(1)]
    host.send_batch(wire_request(2))  # fills the limit, so only its end releases the instance
    gate.open(2)
    responses = host.receive_frame()
    assert [type(message) for message in responses] == [m.Response, m.BatchDone]
    assert isinstance(responses[0], m.Response)
    assert (responses[0].batch, output_value(responses[0])) == (2, 2)
    gate.open(1)
    assert host.receive(m.BatchDone).batch == 1
    assert [output_value(message) for message in host.received(m.Response)] == [1]


def test_the_end_of_an_earlier_batch_releases_the_instance_that_was_at_its_limit(
    start_stub: StartStub,
) -> None:
    gate = Gate()

    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        await gate.wait(input_value(requests[0]))
        return [echo(request) for request in requests]

    host = start_stub(execute, max_concurrent_batches=2)
    host.send_batch(wire_request(1))
    assert host.receive_frame() == [m.InstanceReleased(1)]
    host.send_batch(wire_request(2))
    host.send_batch(wire_request(3))  # prefetched: it starts when another one has ended
    gate.open(1)
    assert [type(message) for message in host.receive_frame()] == [m.Response, m.BatchDone]
    assert host.receive_frame() == [m.InstanceReleased(2)]
    gate.open(3)
    assert host.receive(m.BatchDone).batch == 3
    gate.open(2)
    assert host.receive(m.BatchDone).batch == 2


@pytest.mark.parametrize("concurrent", [1, 2])
def test_a_coroutine_that_does_not_wait_ends_like_a_function(
    start_stub: StartStub, concurrent: int
) -> None:
    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        return [echo(request) for request in requests]

    host = start_stub(execute, max_concurrent_batches=concurrent)
    for value in (1, 2):
        host.send_batch(wire_request(value))
        assert [type(message) for message in host.receive_frame()] == [m.Response, m.BatchDone]


def test_an_event_loop_that_the_model_stops_goes_on_with_the_batches_that_run_and_wait(
    start_stub: StartStub,
) -> None:
    gate = Gate()

    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        await gate.wait(input_value(requests[0]))
        asyncio.get_running_loop().stop()
        return [echo(request) for request in requests]

    host = start_stub(execute, max_concurrent_batches=2)
    for value in (1, 2, 3):  # the third one waits for the end of another one
        host.send_batch(wire_request(value))
    gate.wait_until_reached(1)
    for value in (2, 3, 1):
        gate.open(value)
        assert host.receive(m.BatchDone).batch == value
    assert [output_value(message) for message in host.received(m.Response)] == [2, 3, 1]


def test_a_model_is_finalized_while_its_event_loop_is_blocked(
    start_stub: StartStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pb_utils._event_loop._STOP_SECONDS", 0.01)
    blocked, free = threading.Event(), threading.Event()

    async def execute(requests: Requests) -> None:
        await asyncio.sleep(0)
        blocked.set()
        free.wait(2 * DEADLINE)  # longer than the test waits

    host = start_stub(execute, decoupled=True)
    host.run_batch(wire_request(1))
    assert blocked.wait(DEADLINE)
    try:
        assert host.finalize() == m.Finalized(None)
    finally:
        free.set()


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_batch_whose_task_is_cancelled_before_it_begins_fails_and_the_next_one_runs(
    start_stub: StartStub, decoupled: bool
) -> None:
    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse] | None:
        value = input_value(requests[0])
        if value == 1:
            host.send_batch(wire_request(2))
            while len(asyncio.all_tasks()) == 1:  # noqa: ASYNC110 - to continue before the new task
                await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        if not decoupled:
            return [echo(request) for request in requests]
        requests[0].get_response_sender().send(response(value), FINAL)
        return None

    host = start_stub(execute, max_concurrent_batches=2, decoupled=decoupled)
    host.send_batch(wire_request(1))
    answers = {message.batch: message for message in map(host.receive, [m.Response] * 2)}
    assert output_value(answers[1]) == 1
    assert error_text(answers[2])
    assert {host.receive(m.BatchDone).batch for _ in range(2)} == {1, 2}
    host.send_batch(wire_request(3))
    assert output_value(host.receive(m.Response)) == 3


def test_a_model_may_set_a_task_factory_that_runs_the_first_step_of_a_task(
    start_stub: StartStub,
) -> None:
    def run_at_once(loop: asyncio.AbstractEventLoop, coroutine: Any, **_: Any) -> Any:
        done = loop.create_future()
        try:
            coroutine.send(None)
        except StopIteration as stop:
            done.set_result(stop.value)
        return done

    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        asyncio.get_running_loop().set_task_factory(run_at_once)
        return [echo(request) for request in requests]

    host = start_stub(execute)
    for value in (1, 2, 3):
        assert output_values(host.run_batch(wire_request(value))[0]) == {0: value}


def test_a_decoupled_coroutine_that_ends_after_its_batch_sends_no_empty_frame(
    start_stub: StartStub,
) -> None:
    async def execute(requests: Requests) -> None:
        requests[0].get_response_sender().send(response(1), FINAL)
        await asyncio.Event().wait()

    host = start_stub(execute, decoupled=True)
    host.run_batch(wire_request(1))
    host.send_service(m.Finalize())  # cancels the coroutine first
    assert host.receive_frame() == [m.Finalized(None)]


def test_the_coroutine_of_a_decoupled_model_responds_after_the_end_of_its_batch(
    start_stub: StartStub,
) -> None:
    gate = Gate()

    async def execute(requests: Requests) -> None:
        value = input_value(requests[0])
        await gate.wait(value)
        sender = requests[0].get_response_sender()
        sender.send(response(value))
        sender.send(flags=FINAL)

    host = start_stub(execute, decoupled=True)
    for value in (1, 2):
        responses, done = host.run_batch(wire_request(value))
        assert (responses, done.deferred) == ([], (0,))
    for value in (2, 1):
        gate.open(value)
        first, last = host.receive(m.Response), host.receive(m.Response)
        assert (first.batch, first.final, output_value(first)) == (value, False, value)
        assert (last.batch, last.final, last.response) == (value, True, None)


def test_an_exception_in_the_coroutine_of_a_decoupled_model_fails_its_open_requests(
    start_stub: StartStub,
) -> None:
    gate = Gate()

    async def execute(requests: Requests) -> None:
        requests[0].get_response_sender().send(response(1), FINAL)
        await gate.wait(0)
        raise ValueError("out of luck")

    host = start_stub(execute, decoupled=True)
    host.send_batch(*map(wire_request, (0, 1, 2)))
    host.receive(m.BatchDone)
    assert host.receive(m.Response).index == 0
    gate.open(0)
    failed = [host.receive(m.Response), host.receive(m.Response)]
    assert [message.index for message in failed] == [1, 2]
    assert all(
        error_text(message).startswith(f"{FAILED}ValueError: out of luck") for message in failed
    )
    line = host.receive(m.LogLine)
    assert (line.level, line.batch) == (2, 1)
    assert line.text.startswith("Traceback") and line.text.endswith("ValueError: out of luck")


def test_a_coroutine_sees_that_its_request_is_cancelled(start_stub: StartStub) -> None:
    gate = Gate()
    seen: list[list[bool]] = []

    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        await gate.wait(0)
        seen.append([request.is_cancelled() for request in requests])
        return [echo(request) for request in requests]

    host = start_stub(execute, max_concurrent_batches=2)
    host.send_batch(*map(wire_request, (0, 1)))
    host.receive(m.InstanceReleased)
    gate.wait_until_reached(0)
    host.send_service(m.CancelRequest(1, 1))
    host.drain_service_messages()
    gate.open(0)
    host.receive(m.BatchDone)
    assert seen == [[False, True]]


def test_a_coroutine_sees_a_cancellation_that_comes_after_another_batch_has_begun(
    start_stub: StartStub,
) -> None:
    gate = Gate()
    seen: list[bool] = []

    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        if input_value(requests[0]) == 1:
            await gate.wait(1)
            seen.append(requests[0].is_cancelled())
        return [echo(request) for request in requests]

    host = start_stub(execute, max_concurrent_batches=2)
    host.send_batch(wire_request(1))
    host.receive(m.InstanceReleased)
    host.send_batch(wire_request(2))
    assert host.receive(m.BatchDone).batch == 2
    host.send_service(m.CancelRequest(1, 0))
    host.drain_service_messages()
    gate.open(1)
    assert host.receive(m.BatchDone).batch == 1
    assert seen == [True]


def test_a_coroutine_reschedules_a_request(start_stub: StartStub) -> None:
    async def execute(requests: Requests) -> list[pb_utils.InferenceResponse | None]:
        requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return [None, echo(requests[1])]

    host = start_stub(execute, max_concurrent_batches=2)
    responses, done = host.run_batch(*map(wire_request, (1, 2)))
    assert output_values(responses) == {1: 2}
    assert (done.rescheduled, done.deferred) == ((0,), ())
