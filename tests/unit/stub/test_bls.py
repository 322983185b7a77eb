"""Requests of a model to other models (BLS): frames, responses, errors, cancellation, refusal."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

import pb_utils
from stub.wire import messages as m
from stub.wire.messages import WireError, WireRequest, WireResponse, WireTensor
from tests.conftest import DEADLINE
from tests.unit.stub.host_peer import (
    HOST_ARENA,
    LARGE,
    HostPeer,
    Model,
    StartStub,
    error_text,
    output_value,
    response,
    wire_request,
    wire_response,
    wire_tensor,
)

Requests = list[pb_utils.InferenceRequest]
Responses = list[pb_utils.InferenceResponse]
Result = TypeVar("Result")

REFUSED = "BLS is only supported during the 'execute' function."
HOST_GONE = "the host has ended"
INSTANCE_ENDED = "the model instance has ended"


def bls_request(value: int = 1) -> pb_utils.InferenceRequest:
    """A request to the model `other`, with the input IN, one INT32."""
    return pb_utils.InferenceRequest(
        request_id=f"bls-{value}",
        model_name="other",
        model_version=3,
        inputs=response(value, "IN").output_tensors(),
        requested_output_names=["Y"],
        parameters={"key": "text"},
        timeout=5,
    )


def value_of(answer: pb_utils.InferenceResponse) -> int:
    """The value of `wire_response`; -1 for an answer without outputs, -2 for an error."""
    if answer.has_error():
        return -2
    tensors = answer.output_tensors()
    return int(tensors[0].as_numpy()[0]) if tensors else -1


def error_of(answer: pb_utils.InferenceResponse) -> str:
    """The text of an answer that is an error."""
    error = answer.error()
    assert error is not None
    return error.message()


def start_thread(call: Callable[[], Result]) -> Future[Result]:
    """Calls a function on a new thread, which is one of the model's."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    context = contextvars.copy_context()  # tells which of the stubs of this process calls
    threading.Thread(target=context.run, args=(run,), daemon=True).start()
    return result


def error_answer(text: str) -> WireResponse:
    """An error response of another model."""
    return WireResponse([], {}, WireError(int(pb_utils.TritonError.UNAVAILABLE), text))


def execute_exec(requests: Requests) -> Responses:
    """Returns what the other model answers."""
    return [response(value_of(bls_request().exec()))]


def execute_in_thread(requests: Requests) -> Responses:
    """As `execute_exec`, from a thread of the model."""
    return [response(value_of(start_thread(lambda: bls_request().exec()).result(DEADLINE)))]


async def execute_async_exec(requests: Requests) -> Responses:
    """As `execute_exec`, from a coroutine."""
    return [response(value_of(await bls_request().async_exec()))]


def execute_decoupled(requests: Requests) -> Responses:
    """Returns the sum of the answers of a decoupled model."""
    return [response(sum(map(value_of, bls_request().exec(decoupled=True))))]


async def execute_async_decoupled(requests: Requests) -> Responses:
    """As `execute_decoupled`, from a coroutine."""
    total = 0
    async for answer in await bls_request().async_exec(decoupled=True):
        total += value_of(answer)
    return [response(total)]


def send_answer(host: HostPeer, request: m.BlsRequest, answer: m.BlsResponse) -> None:
    """Sends an answer to the thread that waits for it."""
    (host.send_work if request.blocking else host.send_bls)(answer)


@pytest.mark.parametrize(
    ("execute", "blocking", "decoupled", "knows_batch"),
    [
        (execute_exec, True, False, True),
        (execute_in_thread, False, False, False),
        (execute_async_exec, False, False, True),
        (execute_decoupled, False, True, True),
        (execute_async_decoupled, False, True, True),
    ],
)
def test_a_request_is_sent_with_its_fields_and_its_answer_reaches_the_model(
    start_stub: StartStub, execute: Any, blocking: bool, decoupled: bool, knows_batch: bool
) -> None:
    """A thread of the model does not know the batch that started it."""
    host = start_stub(execute)
    batch = host.send_batch(wire_request(0))
    sent = host.receive(m.BlsRequest)
    assert (sent.blocking, sent.decoupled) == (blocking, decoupled)
    assert sent.batch == (batch if knows_batch else 0)
    request = sent.request
    assert (request.id, request.model, request.version) == ("bls-1", "other", 3)
    assert (request.inputs, request.outputs) == ([wire_tensor(1)], ["Y"])
    assert (request.parameters, request.timeout) == ({"key": "text"}, 5)
    send_answer(host, sent, m.BlsResponse(sent.number, wire_response(42)))
    assert output_value(host.receive(m.Response)) == 42
    assert host.receive(m.BatchDone).failure is None


def exec_in_thread() -> pb_utils.InferenceResponse:
    """The answer to a request of a thread of the model."""
    return start_thread(lambda: bls_request().exec()).result(DEADLINE)


@pytest.mark.parametrize("call", [lambda: bls_request().exec(), exec_in_thread])
def test_an_error_of_the_other_model_is_a_response_with_its_code_and_text(
    start_stub: StartStub, call: Callable[[], pb_utils.InferenceResponse]
) -> None:
    host = start_stub(lambda _: [call()])
    host.send_batch(wire_request(0))
    sent = host.receive(m.BlsRequest)
    send_answer(host, sent, m.BlsResponse(sent.number, error_answer("not now")))
    message = host.receive(m.Response)
    assert error_text(message) == "not now"
    assert message.response is not None and message.response.error is not None
    assert message.response.error.code == int(pb_utils.TritonError.UNAVAILABLE)


@pytest.mark.parametrize(
    "execute",
    [
        execute_exec,
        execute_in_thread,
        execute_async_exec,
        execute_decoupled,
        execute_async_decoupled,
    ],
)
def test_an_answer_whose_shared_memory_cannot_be_opened_is_an_error_response(
    start_stub: StartStub, execute: Any
) -> None:
    """For example because the stub has no more descriptors. The stub continues."""
    host = start_stub(execute)
    host.send_batch(wire_request(0))
    sent = host.receive(m.BlsRequest)
    gone = WireTensor("Y", 8, [LARGE], None, 9, 4096, 4 * LARGE)
    send_answer(host, sent, m.BlsResponse(sent.number, WireResponse([gone], {})))
    assert output_value(host.receive(m.Response)) == -2
    assert host.receive(m.BlockRelease).blocks == [(9, 4096, 1)]
    host.drain_service_messages()


@pytest.mark.parametrize("execute", [execute_decoupled, execute_async_decoupled])
def test_an_iterator_yields_the_answers_up_to_the_final_flag(
    start_stub: StartStub, execute: Any
) -> None:
    """The final flag alone is an answer without outputs: it counts -1."""
    host = start_stub(execute)
    host.send_batch(wire_request(0))
    number = host.receive(m.BlsRequest).number
    for value in (100, 20):
        host.send_service(m.BlsResponse(number, wire_response(value), False))
    host.send_service(m.BlsResponse(number, None, True))
    assert output_value(host.receive(m.Response)) == 119


def test_an_iterator_ends_with_a_final_answer(start_stub: StartStub) -> None:
    host = start_stub(execute_decoupled)
    host.send_batch(wire_request(0))
    number = host.receive(m.BlsRequest).number
    host.send_service(m.BlsResponse(number, wire_response(100), False))
    host.send_service(m.BlsResponse(number, wire_response(20), True))
    assert output_value(host.receive(m.Response)) == 120


def test_answers_reach_the_request_that_they_belong_to(start_stub: StartStub) -> None:
    async def execute(requests: Requests) -> Responses:
        answers = await asyncio.gather(*(bls_request(value).async_exec() for value in (1, 2, 3)))
        first, second, third = map(value_of, answers)
        return [response(100 * first + 10 * second + third)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    sent = [host.receive(m.BlsRequest) for _ in range(3)]
    assert len({request.number for request in sent}) == 3
    for request in reversed(sent):  # the values are those of the inputs
        value = int(request.request.id.removeprefix("bls-"))
        host.send_service(m.BlsResponse(request.number, wire_response(value)))
    assert output_value(host.receive(m.Response)) == 123


def receive_requests(host: HostPeer, count: int) -> list[m.BlsRequest]:
    """Waits for `count` requests to other models."""
    return [host.receive(m.BlsRequest) for _ in range(count)]


def test_the_requests_of_one_turn_are_sent_in_few_frames(start_stub: StartStub) -> None:
    async def execute(requests: Requests) -> Responses:
        answers = await asyncio.gather(*[bls_request(value).async_exec() for value in range(50)])
        return [response(sum(map(value_of, answers)))]

    host = start_stub(execute, max_concurrent_batches=2)
    host.send_batch(wire_request(1))
    frames: list[list[m.BlsRequest]] = []
    while sum(map(len, frames)) < 50:
        frame = host.receive_frame()
        frames.append([message for message in frame if isinstance(message, m.BlsRequest)])
    sent = [request for frame in frames for request in frame]
    assert [request.request.id for request in sent] == [f"bls-{value}" for value in range(50)]
    host.send_bls(*(m.BlsResponse(request.number, wire_response(2)) for request in sent))
    assert output_value(host.receive(m.Response)) == 100


def test_a_coroutine_that_computes_does_not_delay_its_requests(start_stub: StartStub) -> None:
    sent = threading.Event()

    async def execute(requests: Requests) -> Responses:
        futures = [bls_request(value).async_exec() for value in range(5)]
        assert sent.wait(DEADLINE)
        return [response(sum(map(value_of, await asyncio.gather(*futures))))]

    host = start_stub(execute, max_concurrent_batches=2)
    host.send_batch(wire_request(1))
    requests = receive_requests(host, 5)
    sent.set()
    for request in requests:
        send_answer(host, request, m.BlsResponse(request.number, wire_response(3)))
    assert output_value(host.receive(m.Response)) == 15


def exec_on_the_loop() -> int:
    return value_of(bls_request().exec())


def exec_in_a_thread() -> int:
    return start_thread(exec_on_the_loop).result(DEADLINE)


def iterate_on_the_loop() -> int:
    return sum(map(value_of, bls_request().exec(decoupled=True)))


def exec_on_another_loop() -> int:
    async def call() -> int:
        return value_of(await bls_request().async_exec())

    return start_thread(lambda: asyncio.run(call())).result(DEADLINE)


@pytest.mark.parametrize(
    "call", [exec_on_the_loop, exec_in_a_thread, iterate_on_the_loop, exec_on_another_loop]
)
def test_a_coroutine_that_blocks_its_event_loop_gets_the_answer(
    start_stub: StartStub, call: Callable[[], int]
) -> None:
    """The loop reads answers once it has sent a request, but it cannot while it is blocked."""

    async def execute(requests: Requests) -> Responses:
        first = value_of(await bls_request().async_exec())
        return [response(first + call() + value_of(await bls_request().async_exec()))]

    host = start_stub(execute, max_concurrent_batches=2)
    host.send_batch(wire_request(1))
    for value in (1, 20, 300):
        request = host.receive(m.BlsRequest)
        send_answer(host, request, m.BlsResponse(request.number, wire_response(value)))
    assert output_value(host.receive(m.Response)) == 321


def test_an_iterator_of_the_loop_can_be_read_while_the_loop_is_blocked(
    start_stub: StartStub,
) -> None:
    first = threading.Event()

    async def execute(requests: Requests) -> Responses:
        answers = await bls_request().async_exec(decoupled=True)
        first.set()
        return [response(sum(map(value_of, answers)))]

    host = start_stub(execute, max_concurrent_batches=2)
    host.send_batch(wire_request(1))
    request = host.receive(m.BlsRequest)
    host.send_bls(m.BlsResponse(request.number, wire_response(1), False))
    assert first.wait(DEADLINE)
    host.send_bls(m.BlsResponse(request.number, wire_response(2), False))
    host.send_bls(m.BlsResponse(request.number, wire_response(3)))
    assert output_value(host.receive(m.Response)) == 6


@pytest.mark.parametrize("reverse", [False, True])
def test_threads_that_wait_at_once_get_their_own_answers(
    start_stub: StartStub, reverse: bool
) -> None:
    """One of them reads for all, and hands over to another one when it has its own answer."""

    def call(value: int) -> int:
        return value_of(bls_request(value).exec()) + value_of(bls_request(value).exec())

    def execute(requests: Requests) -> Responses:
        calls = [start_thread(partial(call, value)) for value in range(8)]
        return [response(int(all(one.result(DEADLINE) == 2 * i for i, one in enumerate(calls))))]

    host = start_stub(execute)
    host.send_batch(wire_request(1))
    for _ in range(2):
        sent = receive_requests(host, 8)
        sent.sort(key=lambda request: request.number, reverse=reverse)
        answers = [
            m.BlsResponse(request.number, wire_response(int(request.request.id.split("-")[1])))
            for request in sent
        ]
        host.send_bls(*answers[:3])
        for answer in answers[3:]:
            host.send_bls(answer)
    assert output_value(host.receive(m.Response)) == 1


def test_threads_and_iterators_wait_at_the_same_time(start_stub: StartStub) -> None:
    """An iterator needs the service thread, which takes over from a thread that reads, and back."""

    def execute(requests: Requests) -> Responses:
        before = start_thread(exec_on_the_loop)
        answers = bls_request().exec(decoupled=True)
        after = start_thread(exec_on_the_loop)
        total = sum(map(value_of, answers)) + before.result(DEADLINE) + after.result(DEADLINE)
        return [response(total + exec_in_a_thread())]

    host = start_stub(execute)
    host.send_batch(wire_request(1))
    before, iterated = sorted(receive_requests(host, 2), key=lambda one: one.decoupled)
    host.send_bls(m.BlsResponse(iterated.number, wire_response(1), False))
    after = host.receive(m.BlsRequest)
    host.send_bls(m.BlsResponse(iterated.number, wire_response(20)))
    host.send_bls(m.BlsResponse(after.number, wire_response(300)))
    host.send_bls(m.BlsResponse(before.number, wire_response(4000)))
    host.send_bls(m.BlsResponse(host.receive(m.BlsRequest).number, wire_response(50_000)))
    assert output_value(host.receive(m.Response)) == 54_321


def test_no_finaliser_of_the_model_runs_while_answers_are_read(start_stub: StartStub) -> None:
    """It may wait for an answer itself, and the thread that reads would wait for itself."""
    finalised: Future[int] = Future()

    class Caller:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            finalised.set_result(value_of(bls_request().exec()))

    class Loop(asyncio.SelectorEventLoop):
        # Its base relates the types of the callback and of its arguments.
        def call_soon_threadsafe(  # type: ignore[override]
            self,
            callback: Callable[..., object],
            *args: Any,
            context: contextvars.Context | None = None,
        ) -> asyncio.Handle:
            Caller()
            for _ in range(2):
                [[] for _ in range(10)]  # enough for a collection
            return super().call_soon_threadsafe(callback, *args, context=context)

    async def call() -> int:
        return value_of(await bls_request().async_exec())

    def call_on_own_loop() -> int:
        loop = Loop()
        try:
            return loop.run_until_complete(call())
        finally:
            loop.close()

    def execute(requests: Requests) -> Responses:
        value = start_thread(call_on_own_loop).result(DEADLINE)
        gc.collect()
        return [response(value)]

    host = start_stub(execute)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        host.send_batch(wire_request(1))
        for value in (3, 4):
            request = host.receive(m.BlsRequest)
            send_answer(host, request, m.BlsResponse(request.number, wire_response(value)))
        assert output_value(host.receive(m.Response)) == 3
    finally:
        gc.set_threshold(*thresholds)
    assert finalised.result(DEADLINE) == 4


@pytest.mark.parametrize("on_loop", [False, True])
def test_answers_keep_their_order_when_their_ring_is_full(
    start_stub: StartStub, on_loop: bool
) -> None:
    orders: list[list[int]] = []

    async def collect_on_loop(requests: Requests) -> Responses:
        found = await bls_request().async_exec(decoupled=True)
        orders.append([value_of(answer) async for answer in found])
        return [response(0)]

    def collect(requests: Requests) -> Responses:
        orders.append([value_of(answer) for answer in bls_request().exec(decoupled=True)])
        return [response(0)]

    host = start_stub(collect_on_loop if on_loop else collect, max_concurrent_batches=2)
    host.send_batch(wire_request(1))
    number = host.receive(m.BlsRequest).number

    def answer(value: int) -> m.BlsResponse:
        large = WireResponse(wire_response(value).outputs, {"filler": "x" * 30_000})
        return m.BlsResponse(number, large, value == 60)

    host.send_bls(*map(answer, range(40)))  # a frame that is longer than the ring
    for value in range(40, 61):
        host.send_bls(answer(value))
    host.receive(m.Response)
    assert orders == [list(range(61))]


def test_a_stub_in_which_a_batch_waits_is_not_idle(
    start_stub: StartStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle: list[bool] = []
    sleeps = threading.Event()

    def execute(requests: Requests) -> Responses:
        if not idle:
            bls_request().exec()
        worker = host.worker()
        assert worker is not None
        idle.append(worker.is_idle())
        return [response(7)]

    def watch(wait_ms: int | None) -> Any:
        worker = host.worker()
        if wait_ms is None and worker is not None and worker._deferred_work:
            sleeps.set()
        return has_work(wait_ms)

    host = start_stub(execute)
    worker = host.worker()
    assert worker is not None
    has_work = worker._channel._has_work
    monkeypatch.setattr(worker._channel, "_has_work", watch)
    del worker
    batches = [host.send_batch(wire_request(1))]
    number = host.receive(m.BlsRequest).number
    batches.append(host.send_batch(wire_request(2)))
    returned = batches[-1] + 1
    host.send_work(m.Execute(returned, [wire_request(3)], True))
    assert host.receive(m.BatchReturned).batch == returned  # it has read both, and waits again
    assert sleeps.wait(DEADLINE)
    host.send_work(m.BlsResponse(number, wire_response(1)))
    assert [host.receive(m.BatchDone).batch for _ in batches] == batches
    assert idle == [False, False]


def test_a_batch_that_arrives_while_execute_waits_runs_after_it(start_stub: StartStub) -> None:
    host = start_stub(execute_exec)
    first = host.send_batch(wire_request(0))
    sent = host.receive(m.BlsRequest)
    second = host.send_batch(wire_request(0))
    host.send_work(m.BlsResponse(sent.number, wire_response(1)))
    assert host.receive(m.BatchDone).batch == first
    sent = host.receive(m.BlsRequest)
    assert sent.batch == second
    host.send_work(m.BlsResponse(sent.number, wire_response(2)))
    assert host.receive(m.BatchDone).batch == second
    assert [output_value(message) for message in host.received(m.Response)] == [1, 2]


@pytest.mark.parametrize("ends", ["cancel", "delete"])
def test_an_iterator_that_is_cancelled_or_deleted_cancels_its_request(
    start_stub: StartStub, ends: str
) -> None:
    def execute(requests: Requests) -> Responses:
        answers = bls_request().exec(decoupled=True)
        if ends == "cancel":
            answers.cancel()
            answers.cancel()  # does nothing more
        else:
            del answers
        return [response(7)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    number = host.receive(m.BlsRequest).number
    host.send_service(m.BlsResponse(number, wire_response(1), False))
    assert host.receive(m.CancelBls).number == number
    assert output_value(host.receive(m.Response)) == 7
    host.send_service(m.BlsResponse(number, error_answer("cancelled"), True))
    host.drain_service_messages()
    assert host.received(m.CancelBls) == []


def test_a_cancelled_future_cancels_its_request(start_stub: StartStub) -> None:
    async def execute(requests: Requests) -> Responses:
        future = bls_request().async_exec()
        future.cancel()
        return [response(7)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    number = host.receive(m.BlsRequest).number
    assert host.receive(m.CancelBls).number == number
    assert output_value(host.receive(m.Response)) == 7
    host.send_service(m.BlsResponse(number, error_answer("cancelled"), True))
    host.drain_service_messages()


def test_a_request_that_does_not_end_in_time_is_cancelled_and_fails(start_stub: StartStub) -> None:
    host = start_stub(lambda _: [bls_request().exec(execution_timeout=0.001)])
    host.send_batch(wire_request(0))
    number = host.receive(m.BlsRequest).number
    assert host.receive(m.CancelBls).number == number
    assert "'other' was cancelled" in error_text(host.receive(m.Response))


# The host ends while a call waits


def test_a_thread_that_waits_for_an_answer_gets_an_error_when_the_host_ends(
    start_stub: StartStub,
) -> None:
    waiting: list[Future[pb_utils.InferenceResponse]] = []

    def execute(requests: Requests) -> Responses:
        waiting.append(start_thread(lambda: bls_request().exec()))
        return [response(0)]

    host = start_stub(execute)
    host.run_batch(wire_request(0))
    host.receive(m.BlsRequest)
    host.end_host()
    answer = waiting[0].result(DEADLINE)
    assert error_of(answer) == HOST_GONE
    host.wait_for_end()


def test_an_iterator_ends_with_an_error_when_the_host_ends(start_stub: StartStub) -> None:
    answers: Future[list[int]] = Future()

    def execute(requests: Requests) -> None:
        answers.set_result([value_of(answer) for answer in bls_request().exec(decoupled=True)])

    host = start_stub(execute, decoupled=True)
    host.send_batch(wire_request(0))
    number = host.receive(m.BlsRequest).number
    host.send_service(m.BlsResponse(number, wire_response(5), False))
    host.end_host()
    assert answers.result(DEADLINE)[-1] == -2
    host.wait_for_end()


def test_a_coroutine_that_waits_for_an_answer_does_not_outlive_the_host(
    start_stub: StartStub,
) -> None:
    host = start_stub(execute_async_exec)
    host.send_batch(wire_request(0))
    host.receive(m.BlsRequest)
    host.end_host()
    host.wait_for_end()


def test_execute_that_waits_for_an_answer_ends_when_the_host_ends(start_stub: StartStub) -> None:
    host = start_stub(execute_exec)
    host.send_batch(wire_request(0))
    host.receive(m.BlsRequest)
    host.end_host()
    host.wait_for_end()


def test_a_request_after_the_end_of_the_host_fails(start_stub: StartStub) -> None:
    ended = threading.Event()
    late: list[Future[pb_utils.InferenceResponse]] = []

    def call_late() -> pb_utils.InferenceResponse:
        assert ended.wait(DEADLINE)
        return bls_request().exec()

    def execute(requests: Requests) -> Responses:
        late.append(start_thread(call_late))
        return [response(0)]

    host = start_stub(execute)
    host.run_batch(wire_request(0))
    host.end_host()
    host.wait_for_end()
    ended.set()
    assert error_of(late[0].result(DEADLINE)) == HOST_GONE


# Outside of `execute`


class BlsInInitialize(Model):
    """A model that sends requests while its instance is initialized."""

    def __init__(self) -> None:
        super().__init__(execute_exec)
        self.refusals: list[str] = []

    def provide(self) -> Model:
        """Sends requests, also from a coroutine."""

        async def call() -> None:
            await bls_request().async_exec()

        calls: list[Callable[[], object]] = [
            lambda: bls_request().exec(),
            lambda: bls_request().exec(decoupled=True),
            lambda: asyncio.run(call()),
        ]
        for one in calls:
            with pytest.raises(pb_utils.TritonModelException) as refusal:
                one()
            self.refusals.append(str(refusal.value))
        return self


class BlsInFinalize(Model):
    """A model that sends a request in `finalize`."""

    def __init__(self) -> None:
        super().__init__(execute_exec)
        self.refusals: list[str] = []

    def finalize(self) -> None:
        """Sends requests."""
        for decoupled in (False, True):
            try:
                bls_request().exec(decoupled)
            except pb_utils.TritonModelException as refusal:
                self.refusals.append(str(refusal))
        bls_request().exec()


def test_a_request_during_initialization_is_refused_and_the_model_serves_after_it(
    start_stub: StartStub,
) -> None:
    model = BlsInInitialize()
    host = start_stub(model)
    assert model.refusals == [REFUSED] * 3
    host.send_batch(wire_request(0))
    sent = host.receive(m.BlsRequest)
    host.send_work(m.BlsResponse(sent.number, wire_response(3)))
    assert output_value(host.receive(m.Response)) == 3


def test_a_request_in_finalize_is_refused_and_the_stub_ends(start_stub: StartStub) -> None:
    model = BlsInFinalize()
    host = start_stub(model)
    finalized = host.finalize()
    assert model.refusals == [REFUSED] * 2
    assert finalized.error is not None and REFUSED in finalized.error
    assert host.received(m.BlsRequest) == []
    host.wait_for_end()


def test_a_request_in_finalize_after_the_end_of_the_host_is_refused(
    start_stub: StartStub,
) -> None:
    model = BlsInFinalize()
    host = start_stub(model)
    host.end_host()
    host.wait_for_end()
    assert model.refusals == [REFUSED] * 2


def test_calls_that_wait_when_their_instance_is_unloaded_end_with_an_error(
    start_stub: StartStub,
) -> None:
    waiting: list[Future[Any]] = []

    def execute(requests: Requests) -> Responses:
        waiting.append(start_thread(lambda: error_of(bls_request().exec())))
        waiting.append(
            start_thread(lambda: [error_of(one) for one in bls_request().exec(decoupled=True)])
        )
        waiting.append(start_thread(lambda: pb_utils.is_model_ready("other")))
        return [response(0)]

    host = start_stub(execute)
    host.run_batch(wire_request(0))
    for kind in (m.BlsRequest, m.BlsRequest, m.IsModelReady):
        host.receive(kind)
    host.finalize()
    assert waiting[0].result(DEADLINE) == INSTANCE_ENDED
    assert waiting[1].result(DEADLINE) == [INSTANCE_ENDED]
    with pytest.raises(pb_utils.TritonModelException, match=INSTANCE_ENDED):
        waiting[2].result(DEADLINE)
    host.wait_for_end()


def test_blocks_that_the_model_no_longer_needs_are_released_before_its_call(
    start_stub: StartStub,
) -> None:
    """The host can use their memory for the response."""

    def execute(requests: Requests) -> Responses:
        requests.clear()
        return [response(value_of(bls_request().exec()))]

    host = start_stub(execute)
    tensor = host.export(np.zeros(LARGE, np.int32))
    host.send_batch(WireRequest("", [tensor], [], {}))
    frame = host.receive_frame()
    assert [type(message) for message in frame] == [m.BlockRelease, m.BlsRequest]
    assert frame[0] == m.BlockRelease([(HOST_ARENA, tensor.offset, 1)])
    assert isinstance(frame[1], m.BlsRequest)
    host.send_work(m.BlsResponse(frame[1].number, wire_response(1)))
    host.receive(m.BatchDone)


def test_a_batch_that_comes_while_a_model_waits_is_returned_if_the_host_can_run_it_elsewhere(
    start_stub: StartStub,
) -> None:
    host = start_stub(execute_exec)
    first = host.send_batch(wire_request(0))
    sent = host.receive(m.BlsRequest)
    host.send_work(m.Execute(first + 1, [wire_request(0)], True))
    host.send_work(m.Execute(first + 2, [wire_request(0)]))
    assert host.receive(m.BatchReturned) == m.BatchReturned(first + 1)
    host.send_work(m.BlsResponse(sent.number, wire_response(42)))
    assert host.receive(m.BatchDone).batch == first
    sent = host.receive(m.BlsRequest)
    assert sent.batch == first + 2
    host.send_work(m.BlsResponse(sent.number, wire_response(43)))
    assert host.receive(m.BatchDone).batch == first + 2
