"""Requests that may be answered several times, and the iterator over their responses."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
)
from pb_utils._stream import ResponseStream
from tests.conftest import DEADLINE, wait_until
from tests.unit.pb_utils.recording import RecordingRuntime, SentRequest

NEVER = 10 * DEADLINE


def made(name: str = "m") -> InferenceRequest:
    return InferenceRequest(inputs=[], requested_output_names=[], model_name=name)


def response(number: int) -> InferenceResponse:
    return InferenceResponse([Tensor("n", np.array([number]))])


def number(item: InferenceResponse) -> int | None:
    """Return the number in a response, None for an empty one."""
    tensors = item.output_tensors()
    return int(tensors[0].as_numpy()[0]) if tensors else None


def answers(question: SentRequest, count: int, bare_end: bool = False) -> None:
    for n in range(count):
        question.receive(response(n), n == count - 1 and not bare_end)
    if bare_end:
        question.receive(None, True)


def asked(runtime: RecordingRuntime, **arguments: Any) -> tuple[ResponseIterator, SentRequest]:
    """Return an iterator that has got its first response, 0."""
    runtime.on_request = lambda question: question.receive(response(0), False)
    iterator = made().exec(decoupled=True, **arguments)
    assert isinstance(iterator, ResponseIterator)
    return iterator, runtime.sent_requests[-1]


def test_each_response_is_given_once_and_the_end_is_told(runtime: RecordingRuntime) -> None:
    runtime.on_request = lambda question: answers(question, 3)
    iterator = made().exec(decoupled=True)
    assert [number(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopIteration) as caught:
        next(iterator)
    assert str(caught.value) == "Iteration is done for the responses."
    assert runtime.sent_requests[0].decoupled is True


def test_an_end_alone_is_an_empty_response(runtime: RecordingRuntime) -> None:
    runtime.on_request = lambda question: answers(question, 2, bare_end=True)
    *two, last = made().exec(decoupled=True)
    assert [number(item) for item in two] == [0, 1]
    assert last.output_tensors() == []
    assert not last.has_error()
    assert last.error() is None
    assert last.parameters() == ""


def test_a_failure_is_the_only_response(runtime: RecordingRuntime) -> None:
    failure = InferenceResponse(error=TritonError("no such model"))
    runtime.on_request = lambda question: question.receive(failure, True)
    assert list(made().exec(decoupled=True)) == [failure]


def test_a_call_out_of_season_raises(runtime: RecordingRuntime) -> None:
    runtime.refuses = "BLS is only supported during the 'execute' function."
    with pytest.raises(TritonModelException) as caught:
        made().exec(decoupled=True)
    assert str(caught.value) == runtime.refuses


def test_anything_with_a_truth_asks_for_several_responses(runtime: RecordingRuntime) -> None:
    runtime.on_request = lambda question: answers(question, 1)
    iterator = made().exec(np.bool_(True))  # type: ignore[call-overload]
    assert len(list(iterator)) == 1


def test_the_call_waits_for_the_first_response_only(runtime: RecordingRuntime) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(made().exec, decoupled=True)
        wait_until(lambda: bool(runtime.sent_requests), "the question")
        assert not call.done()
        runtime.sent_requests[0].receive(response(0), False)
        iterator = call.result(DEADLINE)
        assert number(next(iterator)) == 0
        following = pool.submit(next, iterator)
        runtime.sent_requests[0].receive(response(1), True)
        assert number(following.result(DEADLINE)) == 1


def test_several_threads_share_the_responses_of_one_iterator(runtime: RecordingRuntime) -> None:
    iterator, question = asked(runtime)
    with ThreadPoolExecutor(4) as pool:
        parts = [pool.submit(lambda: [number(item) for item in iterator]) for _ in range(4)]
        for n in range(1, 200):
            question.receive(response(n), False)
        wait_until(lambda: iterator._stream._next == 200, "all responses to be taken")
        question.receive(None, True)
        got = [n for part in parts for n in part.result(DEADLINE)]
    assert sorted(n for n in got if n is not None) == list(range(200))


class TestIteratingAgain:
    def test_a_finished_stream_begins_again_any_number_of_times(
        self, runtime: RecordingRuntime
    ) -> None:
        runtime.on_request = lambda question: answers(question, 5)
        iterator = made().exec(decoupled=True)
        assert [len(list(iterator)) for _ in range(3)] == [5, 5, 5]
        for count, _ in enumerate(iterator, 1):
            if count == 2:
                break
        assert number(next(iterator)) == 2
        assert [number(item) for item in iterator] == [3, 4]

    def test_an_unfinished_stream_is_resumed(self, runtime: RecordingRuntime) -> None:
        iterator, question = asked(runtime)
        assert number(next(iterator)) == 0
        assert iter(iterator) is iterator
        question.receive(response(1), True)
        assert [number(item) for item in iterator] == [1]

    @given(
        count=st.integers(1, 5),
        bare_end=st.booleans(),
        steps=st.lists(st.sampled_from(["arrive", "next", "iter"]), max_size=40),
    )
    def test_follows_the_rules_in_every_order(
        self, count: int, bare_end: bool, steps: list[str]
    ) -> None:
        """Checks against the rules in their shortest form: a list, a place, and whether all is
        there.
        """
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
    def test_tells_the_runtime_once(self, runtime: RecordingRuntime) -> None:
        iterator, question = asked(runtime)
        iterator.cancel()
        iterator.cancel()
        assert question.cancellations == 1
        question.receive(response(1), True)
        assert [number(item) for item in iterator] == [0, 1]
        iterator.cancel()
        assert question.cancellations == 1

    def test_is_nothing_when_all_has_come(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda question: answers(question, 1)
        made().exec(decoupled=True).cancel()
        assert runtime.sent_requests[0].cancellations == 0

    def test_is_done_by_dropping_an_unfinished_iterator(self, runtime: RecordingRuntime) -> None:
        iterator, question = asked(runtime)
        del iterator
        assert question.cancellations == 1

    def test_is_not_done_by_dropping_a_finished_one(self, runtime: RecordingRuntime) -> None:
        iterator, question = asked(runtime)
        question.receive(None, True)
        del iterator
        assert question.cancellations == 0

    def test_what_arrives_for_a_dropped_iterator_is_not_kept(
        self, runtime: RecordingRuntime
    ) -> None:
        iterator, question = asked(runtime)
        earlier = weakref.ref(iterator._stream._responses[0])
        del iterator
        later = response(1)
        alive = weakref.ref(later)
        question.receive(later, False)
        del later
        runtime.on_request = lambda question: None
        gc.collect()
        assert alive() is None
        assert earlier() is None

    def test_a_finaliser_may_run_while_the_stream_is_locked(
        self, runtime: RecordingRuntime
    ) -> None:
        iterator, question = asked(runtime)
        stream = iterator._stream
        with stream._changed:
            del iterator
        assert question.cancellations == 1


class TestInAnEventLoop:
    def test_responses_come_while_the_loop_goes_on(self, runtime: RecordingRuntime) -> None:
        iterator, question = asked(runtime)

        async def model() -> list[int | None]:
            got = [number(await iterator.__anext__())]
            following = asyncio.ensure_future(iterator.__anext__())
            await asyncio.sleep(0)  # the loop is free
            assert not following.done()
            await asyncio.to_thread(question.receive, response(1), False)
            got.append(number(await following))
            await asyncio.to_thread(question.receive, None, True)
            return [*got, *[number(item) async for item in iterator]]

        assert asyncio.run(model()) == [0, 1, None]

    def test_it_begins_again_as_other_iterations_do(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda question: answers(question, 2)

        async def model() -> None:
            iterator = await made().async_exec(decoupled=True)
            for _ in range(2):
                assert [number(item) async for item in iterator] == [0, 1]
            with pytest.raises(StopAsyncIteration):
                await iterator.__anext__()

        asyncio.run(model())

    def test_a_cancelled_wait_loses_no_response_and_leaves_nothing(
        self, runtime: RecordingRuntime
    ) -> None:
        iterator, question = asked(runtime)

        async def model() -> None:
            await iterator.__anext__()
            for _ in range(3):
                waiting = asyncio.ensure_future(iterator.__anext__())
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            assert iterator._stream._waiters == []
            question.receive(response(1), True)
            assert number(await iterator.__anext__()) == 1

        asyncio.run(model())

    def test_hundreds_of_streams_need_no_thread_each(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda question: None
        streams = 500

        async def read(call: asyncio.Future[ResponseIterator]) -> list[int | None]:
            return [number(item) async for item in await call]

        async def model() -> list[list[int | None]]:
            before = set(threading.enumerate())
            readers = [
                asyncio.ensure_future(read(made().async_exec(decoupled=True)))
                for _ in range(streams)
            ]
            for n in range(3):
                await asyncio.sleep(0)
                for question in runtime.sent_requests:
                    question.receive(response(n), n == 2)
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
    def test_needs_a_running_loop(self, runtime: RecordingRuntime) -> None:
        with pytest.raises(RuntimeError):
            made().async_exec()
        assert runtime.sent_requests == []

    def test_calls_run_side_by_side_without_threads(self, runtime: RecordingRuntime) -> None:
        async def model() -> list[int | None]:
            before = set(threading.enumerate())
            futures = [made().async_exec() for _ in range(100)]
            assert all(isinstance(future, asyncio.Future) for future in futures)
            assert set(threading.enumerate()) <= before
            for n, question in reversed(list(enumerate(runtime.sent_requests))):
                assert question.decoupled is False
                question.receive(response(n), True)
            return [number(item) for item in await asyncio.gather(*futures)]

        assert asyncio.run(model()) == list(range(100))

    def test_an_answer_may_come_from_any_thread(self, runtime: RecordingRuntime) -> None:
        def answer_elsewhere(question: SentRequest) -> None:
            threading.Thread(target=answers, args=(question, 1)).start()

        runtime.on_request = answer_elsewhere

        async def model() -> int | None:
            return number(await made().async_exec())

        assert asyncio.run(model()) == 0

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_out_of_season_the_future_raises(
        self, runtime: RecordingRuntime, decoupled: bool
    ) -> None:
        runtime.refuses = "BLS is only supported during the 'execute' function."

        async def model() -> None:
            future = made().async_exec(decoupled)
            with pytest.raises(TritonModelException) as caught:
                await future
            assert str(caught.value) == runtime.refuses

        asyncio.run(model())

    @pytest.mark.parametrize("value", ["", "no", None, []])
    def test_decoupled_must_be_a_bool(self, runtime: RecordingRuntime, value: Any) -> None:
        async def model() -> None:
            with pytest.raises(TypeError, match=r"^async_exec\(\): incompatible function"):
                made().async_exec(value)

        asyncio.run(model())

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_cancelling_the_future_cancels_the_request(
        self, runtime: RecordingRuntime, decoupled: bool
    ) -> None:
        async def model() -> None:
            future = made().async_exec(decoupled)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, 0.001)
            (question,) = runtime.sent_requests
            assert question.cancellations == 1
            question.receive(response(0), True)  # as it still does, from the runtime's thread
            await asyncio.sleep(0)
            assert future.cancelled()

        asyncio.run(model())

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_an_answer_for_a_closed_loop_is_dropped(
        self, runtime: RecordingRuntime, loop: asyncio.AbstractEventLoop, decoupled: bool
    ) -> None:
        async def model() -> None:
            made().async_exec(decoupled)

        loop.run_until_complete(model())
        loop.close()
        (question,) = runtime.sent_requests
        question.receive(response(0), False)
        assert question.cancellations == 1
        question.receive(response(1), True)

    def test_an_answer_that_its_loop_never_sees_is_dropped(
        self, runtime: RecordingRuntime, loop: asyncio.AbstractEventLoop
    ) -> None:
        async def model() -> None:
            made().async_exec(decoupled=True)

        loop.run_until_complete(model())
        (question,) = runtime.sent_requests
        question.receive(response(0), False)
        assert question.cancellations == 0
        loop.close()
        gc.collect()
        assert question.cancellations == 1


class TestExecutionTimeout:
    def late(self, item: InferenceResponse, name: str, seconds: str) -> None:
        error = item.error()
        assert error is not None
        assert error.code() is TritonError.UNAVAILABLE
        assert error.message() == (
            f"The request to model '{name}' was cancelled: it did not complete within its "
            f"execution_timeout of {seconds} seconds."
        )
        assert item.output_tensors() == []

    def test_a_request_that_takes_too_long_is_cancelled(self, runtime: RecordingRuntime) -> None:
        item = made("slow").exec(execution_timeout=0.01)
        self.late(item, "slow", "0.01")
        (question,) = runtime.sent_requests
        assert question.cancellations == 1
        question.receive(response(0), True)  # too late

    def test_a_request_in_time_is_answered(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda question: answers(question, 1)
        assert number(made().exec(execution_timeout=NEVER)) == 0
        assert runtime.sent_requests[0].cancellations == 0

    def test_a_stream_ends_with_the_error(self, runtime: RecordingRuntime) -> None:
        iterator, question = asked(runtime, execution_timeout=0.5)
        *earlier, last = iterator
        assert [number(item) for item in earlier] == [0]
        self.late(last, "m", "0.5")
        assert question.cancellations == 1
        question.receive(response(1), True)
        assert len(list(iterator)) == 2

    def test_a_stream_that_nobody_reads_is_cancelled_as_well(
        self, runtime: RecordingRuntime
    ) -> None:
        iterator, question = asked(runtime, execution_timeout=0.5)
        wait_until(lambda: question.cancellations == 1, "the cancellation")
        assert len(list(iterator)) == 2

    def test_the_call_itself_is_bounded_until_the_first_response(
        self, runtime: RecordingRuntime
    ) -> None:
        (item,) = made().exec(True, execution_timeout=0.01)
        self.late(item, "m", "0.01")

    def test_it_holds_for_futures(self, runtime: RecordingRuntime) -> None:
        async def model() -> None:
            self.late(await made().async_exec(execution_timeout=0.01), "m", "0.01")
            iterator = await made().async_exec(decoupled=True, execution_timeout=0.02)
            (item,) = [item async for item in iterator]
            self.late(item, "m", "0.02")

        asyncio.run(model())
        assert [question.cancellations for question in runtime.sent_requests] == [1, 1]

    def test_an_ended_stream_is_forgotten_before_its_time(self, runtime: RecordingRuntime) -> None:
        runtime.on_request = lambda question: answers(question, 1)
        iterator = made().exec(True, execution_timeout=NEVER)
        kept = weakref.ref(iterator._stream._responses[0])
        runtime.sent_requests.clear()
        del iterator
        gc.collect()
        assert kept() is None

    @pytest.mark.parametrize("seconds", [1e300, float("inf"), np.float32(60)])
    def test_it_may_be_any_number_above_zero(self, runtime: RecordingRuntime, seconds: Any) -> None:
        runtime.on_request = lambda question: answers(question, 1)
        assert number(made().exec(execution_timeout=seconds)) == 0

    @pytest.mark.parametrize("seconds", [0, -1, float("nan"), "1", [1], 1j, 10**400])
    def test_anything_else_is_refused(self, runtime: RecordingRuntime, seconds: Any) -> None:
        for call in (made().exec, made().async_exec):
            with pytest.raises(TypeError, match=r"^(async_)?exec\(\): incompatible function"):
                call(execution_timeout=seconds)
        assert not runtime.sent_requests
        assert not runtime.requests

    def test_it_is_a_keyword_only(self, runtime: RecordingRuntime) -> None:
        with pytest.raises(TypeError, match=r"^exec\(\): incompatible function arguments\."):
            made().exec(False, 1.0)  # type: ignore[call-overload]
