"""Requests to other models (BLS): sends them, and waits for their responses."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c_python_backend_utils import ResponseIterator
from pb_utils import (
    InferenceRequest,
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelException,
    _bls,
)
from pb_utils._bls import ResponseStream, Timer
from tests.conftest import DEADLINE, wait_until
from tests.unit.pb_utils.recording import RecordingRuntime, SentRequest

NEVER = 10 * DEADLINE


def test_callbacks_run_in_the_order_of_their_times() -> None:
    timer, over = Timer(), threading.Event()
    made: list[object] = []
    calls = [("third", -NEVER), ("first", -3 * NEVER), ("second", -2 * NEVER)]
    with timer._changed:  # holds the lock until all callbacks are scheduled
        for name, seconds in calls:
            timer.call_later(seconds, partial(made.append, name))
        timer.call_later(0.0, over.set)
    assert over.wait(DEADLINE)
    assert made == ["first", "second", "third"]


def test_cancelled_callback_does_not_run() -> None:
    timer, over = Timer(), threading.Event()
    made: list[object] = []
    with timer._changed:
        stopped = timer.call_later(0.0, lambda: made.append("stopped"))
        timer.call_later(0.001, over.set)
        stopped.cancel()
    assert over.wait(DEADLINE)
    assert made == []
    assert stopped.is_done()


def test_earlier_callback_interrupts_the_wait_for_a_later_one() -> None:
    timer, over = Timer(), threading.Event()
    timer.call_later(NEVER, over.clear)
    timer.call_later(0.0, over.set)
    assert over.wait(DEADLINE)


def test_one_thread_runs_all_callbacks_of_the_module() -> None:
    threads: set[threading.Thread] = set()
    over = threading.Event()
    for _ in range(100):
        _bls.call_later(0.0, lambda: threads.add(threading.current_thread()))
    _bls.call_later(0.001, over.set)
    assert over.wait(DEADLINE)
    (thread,) = threads
    assert (thread.name, thread.daemon) == ("pbhost-timer", True)


def test_cancelled_callbacks_are_removed_before_their_time() -> None:
    timer = Timer()
    for _ in range(10_000):
        timer.call_later(NEVER, lambda: None).cancel()
    assert len(timer) < 200


def test_removal_keeps_callbacks_that_are_not_cancelled() -> None:
    timer, over = Timer(), threading.Event()
    made: list[object] = []
    with timer._changed:
        for number in range(300):
            alarm = timer.call_later(0.0, partial(made.append, number))
            if number % 2:
                alarm.cancel()
        timer.call_later(0.001, over.set)
    assert over.wait(DEADLINE)
    assert made == list(range(0, 300, 2))


def test_callback_that_raises_does_not_end_the_timer() -> None:
    timer, over = Timer(), threading.Event()
    seen: list[object] = []
    before = threading.excepthook

    def note(arguments: threading.ExceptHookArgs) -> None:
        seen.append(arguments.exc_type)

    threading.excepthook = note
    try:
        timer.call_later(0.0, lambda: [][0])
        thread = timer._thread
        assert thread is not None
        thread.join(DEADLINE)
    finally:
        threading.excepthook = before
    timer.call_later(0.0, over.set)
    assert over.wait(DEADLINE)
    assert seen == [IndexError]


def _rings_in_child(result: Any) -> None:
    over = threading.Event()
    _bls.call_later(0.0, over.set)
    result.put(over.wait(DEADLINE))


def test_a_forked_child_has_a_timer_of_its_own() -> None:
    first = threading.Event()
    _bls.call_later(0.0, first.set)
    assert first.wait(DEADLINE)
    context = multiprocessing.get_context("fork")
    result = context.SimpleQueue()
    child = context.Process(target=_rings_in_child, args=(result,))
    child.start()
    child.join(2 * DEADLINE)
    assert child.exitcode == 0
    assert result.get() is True


def make_request(name: str = "m") -> InferenceRequest:
    return InferenceRequest(inputs=[], requested_output_names=[], model_name=name)


def response(number: int) -> InferenceResponse:
    return InferenceResponse([Tensor("n", np.array([number]))])


def number(item: InferenceResponse) -> int | None:
    """Returns the number in a response; None for an empty one."""
    tensors = item.output_tensors()
    return int(tensors[0].as_numpy()[0]) if tensors else None


def send_responses(sent_request: SentRequest, count: int, bare_end: bool = False) -> None:
    for n in range(count):
        sent_request.receive(response(n), n == count - 1 and not bare_end)
    if bare_end:
        sent_request.receive(None, True)


def open_stream(
    runtime: RecordingRuntime, **arguments: Any
) -> tuple[ResponseIterator, SentRequest]:
    """Sends a request and returns its iterator after the first response, 0."""
    runtime.on_request = lambda sent_request: sent_request.receive(response(0), False)
    iterator = make_request().exec(decoupled=True, **arguments)
    assert isinstance(iterator, ResponseIterator)
    return iterator, runtime.sent_requests[-1]


def test_each_response_is_returned_once_before_stop_iteration(runtime: RecordingRuntime) -> None:
    runtime.on_request = lambda sent_request: send_responses(sent_request, 3)
    iterator = make_request().exec(decoupled=True)
    assert [number(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopIteration) as caught:
        next(iterator)
    assert str(caught.value) == "Iteration is done for the responses."
    assert runtime.sent_requests[0].decoupled is True


def test_final_flag_alone_is_an_empty_response(runtime: RecordingRuntime) -> None:
    runtime.on_request = lambda sent_request: send_responses(sent_request, 2, bare_end=True)
    *two, last = make_request().exec(decoupled=True)
    assert [number(item) for item in two] == [0, 1]
    assert last.output_tensors() == []
    assert not last.has_error()
    assert last.error() is None
    assert last.parameters() == ""


def test_error_is_the_only_response(runtime: RecordingRuntime) -> None:
    failure = InferenceResponse(error=TritonError("no such model"))
    runtime.on_request = lambda sent_request: sent_request.receive(failure, True)
    assert list(make_request().exec(decoupled=True)) == [failure]


def test_exec_raises_when_bls_is_not_allowed(runtime: RecordingRuntime) -> None:
    runtime.refuses = "BLS is only supported during the 'execute' function."
    with pytest.raises(TritonModelException) as caught:
        make_request().exec(decoupled=True)
    assert str(caught.value) == runtime.refuses


def test_decoupled_accepts_any_object_with_bool(runtime: RecordingRuntime) -> None:
    runtime.on_request = lambda sent_request: send_responses(sent_request, 1)
    iterator = make_request().exec(np.bool_(True))  # type: ignore[call-overload]  # on purpose
    assert len(list(iterator)) == 1


def test_exec_waits_for_the_first_response_only(runtime: RecordingRuntime) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(make_request().exec, decoupled=True)
        wait_until(lambda: bool(runtime.sent_requests), "the request to be sent")
        assert not call.done()
        runtime.sent_requests[0].receive(response(0), False)
        iterator = call.result(DEADLINE)
        assert number(next(iterator)) == 0
        following = pool.submit(next, iterator)
        runtime.sent_requests[0].receive(response(1), True)
        assert number(following.result(DEADLINE)) == 1


def test_several_threads_share_the_responses_of_one_iterator(runtime: RecordingRuntime) -> None:
    iterator, sent_request = open_stream(runtime)
    with ThreadPoolExecutor(4) as pool:
        parts = [pool.submit(lambda: [number(item) for item in iterator]) for _ in range(4)]
        for n in range(1, 200):
            sent_request.receive(response(n), False)
        wait_until(lambda: iterator._stream._next == 200, "all responses to be taken")
        sent_request.receive(None, True)
        got = [n for part in parts for n in part.result(DEADLINE)]
    assert sorted(n for n in got if n is not None) == list(range(200))


class TestIteratingAgain:
    def test_finished_stream_restarts_any_number_of_times(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda sent_request: send_responses(sent_request, 5)
        iterator = make_request().exec(decoupled=True)
        assert [len(list(iterator)) for _ in range(3)] == [5, 5, 5]
        for count, _ in enumerate(iterator, 1):
            if count == 2:
                break
        assert number(next(iterator)) == 2
        assert [number(item) for item in iterator] == [3, 4]

    def test_an_unfinished_stream_is_resumed(self, runtime: RecordingRuntime) -> None:
        iterator, sent_request = open_stream(runtime)
        assert number(next(iterator)) == 0
        assert iter(iterator) is iterator
        sent_request.receive(response(1), True)
        assert [number(item) for item in iterator] == [1]

    @given(
        count=st.integers(1, 5),
        bare_end=st.booleans(),
        steps=st.lists(st.sampled_from(["arrive", "next", "iter"]), max_size=40),
    )
    def test_iterations_in_any_order_match_a_reference_model(
        self, count: int, bare_end: bool, steps: list[str]
    ) -> None:
        """Compares with a reference model: a list, a position and whether the stream has ended."""
        sent: list[tuple[InferenceResponse | None, bool]] = [
            (response(n), n == count - 1 and not bare_end) for n in range(count)
        ]
        if bare_end:
            sent.append((None, True))
        total, arrived, place = len(sent), 0, 0
        stream = ResponseStream()
        iterator = ResponseIterator._from_stream(stream)
        for step in steps:
            if step == "arrive" and arrived < total:
                stream.put_response(*sent[arrived])
                arrived += 1
            elif step == "iter":
                iter(iterator)
                if place == arrived == total:
                    place = 0
            elif step == "next" and place < arrived:
                expected = sent[place][0]
                assert number(next(iterator)) == (None if expected is None else place)
                place += 1
            elif step == "next" and arrived == total:
                with pytest.raises(StopIteration):
                    next(iterator)


class TestCancelling:
    def test_cancel_reaches_the_runtime_once(self, runtime: RecordingRuntime) -> None:
        iterator, sent_request = open_stream(runtime)
        iterator.cancel()
        iterator.cancel()
        assert sent_request.cancellations == 1
        sent_request.receive(response(1), True)
        assert [number(item) for item in iterator] == [0, 1]
        iterator.cancel()
        assert sent_request.cancellations == 1

    def test_cancel_after_the_last_response_does_nothing(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda sent_request: send_responses(sent_request, 1)
        make_request().exec(decoupled=True).cancel()
        assert runtime.sent_requests[0].cancellations == 0

    def test_dropping_an_unfinished_iterator_cancels(self, runtime: RecordingRuntime) -> None:
        iterator, sent_request = open_stream(runtime)
        del iterator
        assert sent_request.cancellations == 1

    def test_dropping_a_finished_iterator_does_not_cancel(self, runtime: RecordingRuntime) -> None:
        iterator, sent_request = open_stream(runtime)
        sent_request.receive(None, True)
        del iterator
        assert sent_request.cancellations == 0

    def test_responses_for_a_dropped_iterator_are_not_kept(self, runtime: RecordingRuntime) -> None:
        iterator, sent_request = open_stream(runtime)
        earlier = weakref.ref(iterator._stream._responses[0])
        del iterator
        later = response(1)
        alive = weakref.ref(later)
        sent_request.receive(later, False)
        del later
        runtime.on_request = lambda sent_request: None
        gc.collect()
        assert alive() is None
        assert earlier() is None

    def test_a_finaliser_may_run_while_the_stream_is_locked(
        self, runtime: RecordingRuntime
    ) -> None:
        iterator, sent_request = open_stream(runtime)
        stream = iterator._stream
        with stream._changed:
            del iterator
        assert sent_request.cancellations == 1


class TestAsyncIteration:
    def test_responses_arrive_without_blocking_the_loop(self, runtime: RecordingRuntime) -> None:
        iterator, sent_request = open_stream(runtime)

        async def model() -> list[int | None]:
            got = [number(await iterator.__anext__())]
            following = asyncio.ensure_future(iterator.__anext__())
            await asyncio.sleep(0)  # lets the event loop run
            assert not following.done()
            await asyncio.to_thread(sent_request.receive, response(1), False)
            got.append(number(await following))
            await asyncio.to_thread(sent_request.receive, None, True)
            return [*got, *[number(item) async for item in iterator]]

        assert asyncio.run(model()) == [0, 1, None]

    def test_async_for_restarts_like_for(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda sent_request: send_responses(sent_request, 2)

        async def model() -> None:
            iterator = await make_request().async_exec(decoupled=True)
            for _ in range(2):
                assert [number(item) async for item in iterator] == [0, 1]
            with pytest.raises(StopAsyncIteration):
                await iterator.__anext__()

        asyncio.run(model())

    def test_cancelled_wait_loses_no_response_and_removes_its_waiter(
        self, runtime: RecordingRuntime
    ) -> None:
        iterator, sent_request = open_stream(runtime)

        async def model() -> None:
            await iterator.__anext__()
            for _ in range(3):
                waiting = asyncio.ensure_future(iterator.__anext__())
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            assert iterator._stream._waiters == []
            sent_request.receive(response(1), True)
            assert number(await iterator.__anext__()) == 1

        asyncio.run(model())

    def test_hundreds_of_streams_need_no_threads(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda sent_request: None
        streams = 500

        async def read(call: asyncio.Future[ResponseIterator]) -> list[int | None]:
            return [number(item) async for item in await call]

        async def model() -> list[list[int | None]]:
            before = set(threading.enumerate())
            readers = [
                asyncio.ensure_future(read(make_request().async_exec(decoupled=True)))
                for _ in range(streams)
            ]
            for n in range(3):
                await asyncio.sleep(0)
                for sent_request in runtime.sent_requests:
                    sent_request.receive(response(n), n == 2)
            got = await asyncio.gather(*readers)
            assert set(threading.enumerate()) <= before
            return got

        assert asyncio.run(model()) == [[0, 1, 2]] * streams


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class TestAsyncExec:
    def test_async_exec_needs_a_running_loop(self, runtime: RecordingRuntime) -> None:
        with pytest.raises(RuntimeError):
            make_request().async_exec()
        assert runtime.sent_requests == []

    def test_calls_overlap_without_threads(self, runtime: RecordingRuntime) -> None:
        async def model() -> list[int | None]:
            before = set(threading.enumerate())
            futures = [make_request().async_exec() for _ in range(100)]
            assert all(isinstance(future, asyncio.Future) for future in futures)
            assert set(threading.enumerate()) <= before
            for n, sent_request in reversed(list(enumerate(runtime.sent_requests))):
                assert sent_request.decoupled is False
                sent_request.receive(response(n), True)
            return [number(item) for item in await asyncio.gather(*futures)]

        assert asyncio.run(model()) == list(range(100))

    def test_response_can_come_from_any_thread(self, runtime: RecordingRuntime) -> None:
        def answer_elsewhere(sent_request: SentRequest) -> None:
            threading.Thread(target=send_responses, args=(sent_request, 1)).start()

        runtime.on_request = answer_elsewhere

        async def model() -> int | None:
            return number(await make_request().async_exec())

        assert asyncio.run(model()) == 0

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_future_raises_when_bls_is_not_allowed(
        self, runtime: RecordingRuntime, decoupled: bool
    ) -> None:
        runtime.refuses = "BLS is only supported during the 'execute' function."

        async def model() -> None:
            future = make_request().async_exec(decoupled)
            with pytest.raises(TritonModelException) as caught:
                await future
            assert str(caught.value) == runtime.refuses

        asyncio.run(model())

    @pytest.mark.parametrize("value", ["", "no", None, []])
    def test_decoupled_must_be_a_bool(self, runtime: RecordingRuntime, value: Any) -> None:
        async def model() -> None:
            with pytest.raises(TypeError, match=r"^async_exec\(\): incompatible function"):
                make_request().async_exec(value)

        asyncio.run(model())

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_cancelling_the_future_cancels_the_request(
        self, runtime: RecordingRuntime, decoupled: bool
    ) -> None:
        async def model() -> None:
            future = make_request().async_exec(decoupled)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, 0.001)
            (sent_request,) = runtime.sent_requests
            assert sent_request.cancellations == 1
            sent_request.receive(
                response(0), True
            )  # the cancelled request still gets its last response
            await asyncio.sleep(0)
            assert future.cancelled()

        asyncio.run(model())

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_response_for_a_closed_loop_is_dropped(
        self, runtime: RecordingRuntime, loop: asyncio.AbstractEventLoop, decoupled: bool
    ) -> None:
        async def model() -> None:
            make_request().async_exec(decoupled)

        loop.run_until_complete(model())
        loop.close()
        (sent_request,) = runtime.sent_requests
        if decoupled:  # more responses would come, which nobody reads
            sent_request.receive(response(0), False)
            assert sent_request.cancellations == 1
        sent_request.receive(response(1), True)

    def test_unread_stream_of_a_closed_loop_is_cancelled(
        self, runtime: RecordingRuntime, loop: asyncio.AbstractEventLoop
    ) -> None:
        async def model() -> None:
            make_request().async_exec(decoupled=True)

        loop.run_until_complete(model())
        (sent_request,) = runtime.sent_requests
        sent_request.receive(response(0), False)
        assert sent_request.cancellations == 0
        loop.close()
        gc.collect()
        assert sent_request.cancellations == 1


class TestExecutionTimeout:
    def assert_timed_out(self, item: InferenceResponse, name: str, seconds: str) -> None:
        error = item.error()
        assert error is not None
        assert error.code() is TritonError.UNAVAILABLE
        assert error.message() == (
            f"The request to model '{name}' was cancelled: it did not complete within its "
            f"execution_timeout of {seconds} seconds."
        )
        assert item.output_tensors() == []

    def test_request_is_cancelled_after_execution_timeout(self, runtime: RecordingRuntime) -> None:
        item = make_request("slow").exec(execution_timeout=0.01)
        self.assert_timed_out(item, "slow", "0.01")
        (sent_request,) = runtime.sent_requests
        wait_until(lambda: sent_request.cancellations == 1, "the cancellation")
        sent_request.receive(response(0), True)  # after the timeout

    def test_request_within_execution_timeout_gets_its_response(
        self, runtime: RecordingRuntime
    ) -> None:
        runtime.on_request = lambda sent_request: send_responses(sent_request, 1)
        assert number(make_request().exec(execution_timeout=NEVER)) == 0
        assert runtime.sent_requests[0].cancellations == 0

    def test_stream_ends_with_a_timeout_error(self, runtime: RecordingRuntime) -> None:
        iterator, sent_request = open_stream(runtime, execution_timeout=0.5)
        *earlier, last = iterator
        assert [number(item) for item in earlier] == [0]
        self.assert_timed_out(last, "m", "0.5")
        wait_until(lambda: sent_request.cancellations == 1, "the cancellation")
        sent_request.receive(response(1), True)
        assert len(list(iterator)) == 2

    def test_unread_stream_is_cancelled_after_execution_timeout(
        self, runtime: RecordingRuntime
    ) -> None:
        iterator, sent_request = open_stream(runtime, execution_timeout=0.5)
        wait_until(lambda: sent_request.cancellations == 1, "the cancellation")
        assert len(list(iterator)) == 2

    def test_exec_returns_after_execution_timeout_without_a_response(
        self, runtime: RecordingRuntime
    ) -> None:
        (item,) = make_request().exec(True, execution_timeout=0.01)
        self.assert_timed_out(item, "m", "0.01")

    def test_execution_timeout_applies_to_futures(self, runtime: RecordingRuntime) -> None:
        async def model() -> None:
            self.assert_timed_out(
                await make_request().async_exec(execution_timeout=0.01), "m", "0.01"
            )
            iterator = await make_request().async_exec(decoupled=True, execution_timeout=0.02)
            (item,) = [item async for item in iterator]
            self.assert_timed_out(item, "m", "0.02")

        asyncio.run(model())
        sent = runtime.sent_requests
        wait_until(lambda: [one.cancellations for one in sent] == [1, 1], "the cancellations")

    def test_ended_stream_is_released_before_its_timeout(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda sent_request: send_responses(sent_request, 1)
        iterator = make_request().exec(True, execution_timeout=NEVER)
        kept = weakref.ref(iterator._stream._responses[0])
        runtime.sent_requests.clear()
        del iterator
        gc.collect()
        assert kept() is None

    @pytest.mark.parametrize("seconds", [1e300, float("inf"), np.float32(60)])
    def test_execution_timeout_accepts_numbers_above_zero(
        self, runtime: RecordingRuntime, seconds: Any
    ) -> None:
        runtime.on_request = lambda sent_request: send_responses(sent_request, 1)
        assert number(make_request().exec(execution_timeout=seconds)) == 0

    @pytest.mark.parametrize("seconds", [0, -1, float("nan"), "1", [1], 1j, 10**400])
    def test_execution_timeout_rejects_other_values(
        self, runtime: RecordingRuntime, seconds: Any
    ) -> None:
        for call in (make_request().exec, make_request().async_exec):
            with pytest.raises(TypeError, match=r"^(async_)?exec\(\): incompatible function"):
                call(execution_timeout=seconds)
        assert not runtime.sent_requests
        assert not runtime.requests

    def test_execution_timeout_is_keyword_only(self, runtime: RecordingRuntime) -> None:
        with pytest.raises(TypeError, match=r"^exec\(\): incompatible function arguments\."):
            make_request().exec(False, 1.0)  # type: ignore[call-overload]  # on purpose


def test_what_a_model_answers_when_the_timeout_cancels_it_is_not_a_response() -> None:
    stream = ResponseStream()
    stream.set_cancel_callback(lambda: stream.put_response(response(1), True))
    error = stream.set_timeout(0.01, "too late")
    stream.wait_for_response()
    assert stream.next_response() is error
    assert stream.next_response() is None
