"""Batches of one stub: responses, ends, cancellation, and the death of the stub."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.errors import ErrorCode
from host.inference.call import Batch, Call
from host.inference.request import ExecutionTimes, InferRequest, InferResponse, Tensor
from host.instances.pool import StubPool
from host.instances.stub_log import StubLog
from host.instances.stub_session import StubSession
from host.logs.formats import Label
from host.tracing.trace import Trace, TraceTree
from pb_utils._model_texts import NOT_RESCHEDULED
from stub.wire import messages as m
from stub.wire.messages import INLINE_ALWAYS, INLINE_LIMIT, WireError, WireResponse, WireTensor
from stub.wire.session import State
from tests.conftest import DEADLINE
from tests.unit.host.stub_peer import PeerLauncher, stub_pool

TIMES = ExecutionTimes(10, 11, 13, 16)


def output(value: bytes = b"out") -> WireResponse:
    return WireResponse([WireTensor("y", 2, [len(value)], value)], {})


def done(batch: int, *, failure: str | None = None, deferred: tuple[int, ...] = (),
         rescheduled: tuple[int, ...] = ()) -> m.BatchDone:  # fmt: skip
    return m.BatchDone(batch, 10, 11, 13, 16, failure, deferred, rescheduled)


class Tracked:
    """The session of a stub that serves, what it sends and logs, and the responses to its calls."""

    def __init__(self, pool: StubPool) -> None:
        self.sent: list[m.ToStub] = []
        self.logged: list[tuple[str, list[str]]] = []
        self.faults: list[Exception] = []
        self.failures: list[Exception] = []
        self.responses: dict[str, list[InferResponse | None]] = {}
        self.events: list[str] = []
        self.now = 0
        pool.log_model_line = self.log  # type: ignore[method-assign]
        self.session = StubSession(
            pool,
            StubLog(Label("m", 3, "m_0"), pool),
            {},
            self.faults.append,
            self.failures.append,
            lambda: self.now,
        )
        self.session.link.send_service = self.sent.extend  # type: ignore[method-assign,assignment]
        self.session.protocol.state = State.SERVING
        self.session.name, self.session.version = "m_0", 3

    def close(self) -> None:
        """Releases what the session holds; a failure of the host would be a defect."""
        assert not self.failures
        self.session.link.close()
        self.session.transfer.process_exited()

    def log(self, label: Label, line: m.LogLine, calls: Sequence[Call] = ()) -> None:
        self.logged.append((line.text, [call.request.id for call in calls]))

    def batch(
        self,
        *ids: str,
        max_outstanding_responses: int = 0,
        on_returned: Callable[[Call], None] | None = None,
    ) -> tuple[Batch, list[Call]]:
        calls: list[Call] = []
        for name in ids:
            request = InferRequest("m", [], id=name)
            request.max_outstanding_responses = max_outstanding_responses
            call = Call(request)
            received: list[InferResponse | None] = []
            self.responses[name] = received
            call.subscribe(lambda response, final, received=received: received.append(response))  # type: ignore[misc]
            calls.append(call)
        batch = Batch(
            calls,
            lambda: self.events.append("released"),
            self.batch_done,
            self.count_batches,
            on_returned,
        )
        self.session.run_batch(batch)
        return batch, calls

    def batch_done(self, _: Batch, times: ExecutionTimes | None, released: bool) -> None:
        self.events.append("done" if times else "lost")
        if released:
            self.events.append("released")

    def count_batches(self, batches: Sequence[Batch]) -> None:
        self.events += ["counted" for batch in batches if batch.times is not None]

    def receive(self, *messages: m.ToHost) -> None:
        """Handles a frame with these messages, which keeps to the protocol."""
        self.session.handle_frames([m.encode(messages)])
        assert not self.faults

    def refuse(self, *messages: m.ToHost) -> Exception:
        """Handles a frame that breaks the protocol; returns the fault."""
        self.session.handle_frames([m.encode(messages)])
        (fault,) = self.faults
        self.faults.clear()
        return fault

    def values(self, name: str) -> list[bytes]:
        return [bytes(r.outputs[0].data) for r in self.responses[name] if r is not None]

    def error(self, name: str) -> tuple[ErrorCode, str]:
        (response,) = self.responses[name]
        assert response is not None and response.error is not None
        return response.error.code, response.error.message


def tracked(test: Callable[[Tracked], Awaitable[None] | None]) -> None:
    async def main() -> None:
        async with stub_pool(PeerLauncher()) as pool:
            tested = Tracked(pool)
            result = test(tested)
            if result is not None:
                await asyncio.wait_for(result, DEADLINE)
            tested.close()

    asyncio.run(main())


def test_each_response_reaches_the_call_with_its_index() -> None:
    def test(t: Tracked) -> None:
        batch, _ = t.batch("a", "b")
        t.receive(m.Response(1, 1, output(b"for b")))
        t.receive(m.Response(1, 0, output(b"for a")))
        assert (t.values("a"), t.values("b")) == ([b"for a"], [b"for b"])
        assert t.responses["a"][0] is not None and t.responses["a"][0].model_version == 3
        assert t.session.running and t.events == []
        t.receive(done(1))
        assert t.events == ["done", "released", "counted"]
        assert t.session.idle and not t.session.running

    tracked(test)


def test_instance_is_free_before_a_single_response_and_the_batch_is_counted_after_it() -> None:
    def test(t: Tracked) -> None:
        _, (call,) = t.batch("a")
        call.subscribe(lambda response, final: t.events.append("response"))
        t.receive(m.Response(1, 0, output()), done(1))
        assert t.events == ["done", "released", "response", "counted"]

    tracked(test)


@given(
    st.lists(
        st.sampled_from(["usual", "error", "parameters", "first", "second", "deferred", "released"])
        | st.just("usual"),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=40)
def test_frames_that_arrive_together_do_what_they_do_one_by_one(kinds: list[str]) -> None:
    """Each frame is for a batch of two requests of its own."""
    found: list[object] = []

    def run(together: bool) -> Callable[[Tracked], None]:
        def test(t: Tracked) -> None:
            for index in range(len(kinds)):
                t.batch(f"{index}a", f"{index}b")
            frames = [frame_of(number, kind) for number, kind in enumerate(kinds, 1)]
            for some in [frames] if together else [[frame] for frame in frames]:
                t.session.handle_frames(some)
            answers = {
                name: [r and (r.outputs, r.error, r.parameters) for r in received]
                for name, received in t.responses.items()
            }
            found.append((repr(answers), sorted(t.events), t.logged, t.session.idle, t.faults))

        return test

    tracked(run(together=True))
    tracked(run(together=False))
    assert found[0] == found[1]


def frame_of(number: int, kind: str) -> bytes:
    """The results of a batch of two requests, all of them or some."""
    first, second = (m.Response(number, index, output(b"x%d" % index)) for index in (0, 1))
    messages: dict[str, list[m.ToHost]] = {
        "usual": [first, second, done(number)],
        "error": [
            first,
            m.Response(number, 1, WireResponse([], {}, WireError(3, "no"))),
            done(number),
        ],
        "parameters": [first, m.Response(number, 1, WireResponse([], {"p": 1})), done(number)],
        "first": [first],
        "second": [second, done(number)],
        "deferred": [first, done(number, deferred=(1,))],
        "released": [m.InstanceReleased(number), first, second, done(number)],
    }
    return m.encode(messages[kind])


def test_a_callback_that_fails_loses_no_other_response() -> None:
    def test(t: Tracked) -> None:
        (batch, (call,)), *_ = [t.batch(name) for name in ("bad", "b", "c")]
        delivered: list[bool] = []

        def fail(response: object, final: bool) -> None:
            delivered.append(final)
            raise RuntimeError("a defect")

        call._callback = fail
        frames = [[m.Response(number, 0, output(b"x")), done(number)] for number in (1, 2, 3)]
        t.session.handle_frames([m.encode(frame) for frame in frames])
        assert delivered == [True, True]  # the response, then the error
        assert (t.values("b"), t.values("c")) == ([b"x"], [b"x"])
        assert t.events.count("counted") == 3 and t.session.idle

    tracked(test)


def test_a_bls_request_starts_before_the_results_that_arrive_with_it() -> None:
    """Its model can run meanwhile. The model that waits gets no other work before the response."""

    def test(t: Tracked) -> None:
        (_, (call,)), _ = t.batch("a"), t.batch("b")
        call.subscribe(lambda response, final: t.events.append("response"))
        work: list[tuple[Sequence[m.ToStub], bool]] = []
        t.session.link.send_work = (  # type: ignore[method-assign]
            lambda messages, reclaimed=None, held=False: work.append((messages, held))
        )
        target = Call(InferRequest("target", []))

        def start(request: InferRequest, decoupled: bool) -> Call:
            t.events.append("bls")
            return target

        models = t.session.bls_requests._services.models
        models.infer_for_bls = start  # type: ignore[method-assign]
        models.break_deadlock = lambda call: t.events.append("checked")  # type: ignore[method-assign]
        made = m.BlsRequest(1, m.WireRequest("", [], [], {}), 2, True)
        t.session.handle_frames([m.encode([m.Response(1, 0, output()), done(1)]), m.encode([made])])
        assert t.events == ["bls", "done", "released", "response", "counted", "checked"]
        t.batch("c")
        target.respond(InferResponse("target", 1), True)
        t.batch("d")
        assert [(type(messages[-1]), held) for messages, held in work] == [
            (m.Execute, True), (m.BlsResponse, False), (m.Execute, False)
        ]  # fmt: skip

    tracked(test)


def test_work_is_not_held_for_a_batch_that_has_ended_before_its_request_could_start() -> None:
    """A signal may have ended the wait of the model, and its target is ready only after that."""

    async def test(t: Tracked) -> None:
        t.batch("a")
        work: list[bool] = []
        t.session.link.send_work = (  # type: ignore[method-assign]
            lambda messages, reclaimed=None, held=False: work.append(held)
        )
        ready = asyncio.Event()
        target = Call(InferRequest("target", []))

        async def start_when_ready() -> Call:
            await ready.wait()
            return target

        models = t.session.bls_requests._services.models
        models.infer_for_bls = lambda request, decoupled: start_when_ready()  # type: ignore[method-assign]
        t.receive(m.BlsRequest(1, m.WireRequest("", [], [], {}), 1, True))
        ((_, starting),) = t.session.bls_requests.pending.values()
        t.receive(m.Response(1, 0, output()), done(1))
        ready.set()
        await starting
        t.batch("b")
        assert work == [False]

    tracked(test)


def test_a_batch_that_waited_when_its_stub_died_is_drained() -> None:
    def test(t: Tracked) -> None:
        t.batch("runs")
        _, (waiting,) = t.batch("waits", on_returned=lambda call: None)
        t.session.link.close()
        t.session.refuse_batches("It was killed")
        t.session.stub_exited("It was killed")
        assert list(t.session.reclaim_prefetched(1)) == []
        assert list(t.session.drain_prefetched()) == [waiting]

    tracked(test)


def test_several_responses_are_delivered_before_the_instance_is_free() -> None:
    def test(t: Tracked) -> None:
        _, calls = t.batch("a", "b")
        for call in calls:
            call.subscribe(lambda response, final: t.events.append("response"))
        t.receive(m.Response(1, 0, output()), m.Response(1, 1, output()), done(1))
        assert t.events == ["response", "response", "done", "released", "counted"]

    tracked(test)


def test_response_is_delivered_once_the_whole_frame_is_decoded() -> None:
    def test(t: Tracked) -> None:
        t.batch("a", "b")
        seen: list[int] = []
        decode = t.session.transfer.decode_outputs

        def observe(*given: Any) -> list[Tensor]:
            seen.append(len(t.responses["a"]))
            return decode(*given)

        t.session.transfer.decode_outputs = observe  # type: ignore[method-assign,assignment]
        t.receive(m.Response(1, 0, output()), m.Response(1, 1, output()))
        assert seen == [0, 0]
        assert t.values("a") == t.values("b") == [b"out"]

    tracked(test)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (m.Response(2, 0, None), KeyError),
        (m.Response(1, 1, None), IndexError),
        (m.Response(1, -1, None), ValueError),
        (m.Response(1, 0, None, final=False), ValueError),
        (m.Response(1, 0, WireResponse([], {}, WireError(99, "x"))), IndexError),
        (m.Response(1, 0, WireResponse([WireTensor("y", 99, [0], b"")], {})), KeyError),
    ],
)
def test_response_to_no_request_of_the_stub_or_without_a_meaning_is_refused(
    message: m.Response, error: type[Exception]
) -> None:
    def test(t: Tracked) -> None:
        t.batch("a")
        assert isinstance(t.refuse(message), error)
        assert t.responses["a"] == []

    tracked(test)


def test_second_final_response_to_a_request_is_refused() -> None:
    def test(t: Tracked) -> None:
        t.batch("a", "b")
        t.receive(m.Response(1, 0, output()))
        fault = t.refuse(m.Response(1, 0, output()))
        assert "a response to request 0, which is answered" in str(fault)

    tracked(test)


def test_error_of_the_model_keeps_its_code_and_text() -> None:
    def test(t: Tracked) -> None:
        _, (call,) = t.batch("a")
        t.receive(m.Response(1, 0, WireResponse([], {}, WireError(3, "no good"))))
        assert t.error("a") == (ErrorCode.INVALID_ARG, "no good")
        assert call.failed

    tracked(test)


def test_request_that_a_batch_has_not_answered_fails_at_its_end() -> None:
    def test(t: Tracked) -> None:
        t.batch("a", "b")
        t.receive(m.Response(1, 0, output()))
        t.receive(done(1))
        assert t.values("a") == [b"out"]
        assert t.error("b") == (
            ErrorCode.INTERNAL,
            "instance 'm_0' ended a batch without answering it",
        )

    tracked(test)


def test_failure_of_a_batch_is_logged_with_its_requests() -> None:
    def test(t: Tracked) -> None:
        t.batch("a", "b")
        t.receive(done(1, failure="it broke"))
        assert t.logged == [("it broke", ["a", "b"])]

    tracked(test)


def test_rescheduled_request_of_a_model_that_cannot_reschedule_fails() -> None:
    def test(t: Tracked) -> None:
        t.batch("a")
        t.receive(done(1, rescheduled=(0,)))
        assert t.error("a") == (ErrorCode.INTERNAL, NOT_RESCHEDULED)
        assert t.logged == [(NOT_RESCHEDULED, ["a"])]

    tracked(test)


def test_rescheduled_request_that_its_scheduler_takes_back_stays_open() -> None:
    class Iterating(Call):
        def try_reschedule(self) -> bool:
            return True

    def test(t: Tracked) -> None:
        call = Iterating(InferRequest("m", []))
        batch = Batch([call], lambda: None, lambda *end: None, lambda batches: None)
        t.session.run_batch(batch)
        t.receive(done(1, rescheduled=(0,)))
        assert not call.finished and t.logged == []

    tracked(test)


@pytest.mark.parametrize("index", [-1, 2])
@pytest.mark.parametrize("field", ["deferred", "rescheduled"])
def test_end_of_a_batch_with_requests_that_it_does_not_have_is_refused_without_an_effect(
    field: str, index: int
) -> None:
    def test(t: Tracked) -> None:
        t.batch("a", "b")
        fault = t.refuse(done(1, **{field: (index,)}))  # type: ignore[arg-type]
        assert "requests that it does not have" in str(fault)
        assert t.session.running
        t.session.stub_exited("it has ended")
        assert t.error("a")[0] is t.error("b")[0] is ErrorCode.UNAVAILABLE

    tracked(test)


def test_deferred_request_is_answered_after_its_batch_has_freed_the_instance() -> None:
    def test(t: Tracked) -> None:
        batch, (_, second) = t.batch("a", "b")
        t.receive(m.Response(1, 0, output()))
        t.receive(done(1, deferred=(1,)))
        assert t.events == ["done", "released", "counted"]
        assert (t.session.running, t.session.idle) == (False, False)
        assert list(t.session.calls_of_batch(1)) == list(batch.calls)
        assert not second.finished
        t.receive(m.Response(1, 1, output(b"late")))
        assert t.values("b") == [b"late"]
        assert t.session.idle and not t.session.calls_of_batch(1)

    tracked(test)


def test_request_that_its_batch_left_out_fails_although_the_deferred_one_is_answered_at_once() -> (
    None
):
    def test(t: Tracked) -> None:
        t.batch("a", "b")
        t.receive(done(1, deferred=(0,)), m.Response(1, 0, output()))
        assert t.values("a") == [b"out"]
        assert t.error("b")[0] is ErrorCode.INTERNAL
        assert t.session.idle

    tracked(test)


def test_late_response_that_cannot_be_decoded_leaves_its_request_open() -> None:
    def test(t: Tracked) -> None:
        t.batch("a")
        t.receive(done(1, deferred=(0,)))
        fault = t.refuse(m.Response(1, 0, WireResponse([], {}, WireError(99, "x"))))
        assert isinstance(fault, IndexError)
        t.session.stub_exited("it has ended")
        assert t.error("a") == (ErrorCode.UNAVAILABLE, "it has ended while it ran this request.")

    tracked(test)


def test_batch_that_goes_on_as_a_coroutine_frees_the_instance_once() -> None:
    def test(t: Tracked) -> None:
        t.batch("a")
        t.receive(m.InstanceReleased(1))
        assert t.events == ["released"] and not t.session.running and not t.session.idle
        t.receive(m.Response(1, 0, output()))
        t.receive(done(1))
        assert t.events == ["released", "done", "counted"]
        t.receive(m.InstanceReleased(1))  # it came late
        assert t.events == ["released", "done", "counted"]
        assert isinstance(t.refuse(m.InstanceReleased(2)), KeyError)

    tracked(test)


def test_instance_that_is_free_is_not_freed_again() -> None:
    for messages in (
        (m.InstanceReleased(1), m.InstanceReleased(1)),
        (done(1, deferred=(0,)), m.InstanceReleased(1)),
    ):

        def together(t: Tracked, messages: Sequence[m.ToHost] = messages) -> None:
            t.batch("a")
            assert "instance is free" in str(t.refuse(*messages))
            assert t.events.count("released") == 1

        def one_by_one(t: Tracked, messages: Sequence[m.ToHost] = messages) -> None:
            t.batch("a")
            t.receive(messages[0])
            assert "instance is free" in str(t.refuse(messages[1]))
            assert t.events.count("released") == 1

        tracked(together)
        tracked(one_by_one)


def test_batch_that_every_caller_has_left_is_not_counted() -> None:
    def test(t: Tracked) -> None:
        _, (call,) = t.batch("a")
        call.cancel()
        t.receive(m.BatchDone(1, 0, 0, 0, 0))
        assert t.events == ["lost", "released"]

    tracked(test)


def test_cancellation_is_sent_with_batch_and_index_for_calls_that_the_stub_has() -> None:
    def test(t: Tracked) -> None:
        t.batch("a")
        _, (_, second) = t.batch("b", "c")
        assert t.session.cancel_call(second)
        assert t.sent == [m.CancelRequest(2, 1)]
        assert not t.session.cancel_call(Call(InferRequest("m", [])))
        assert t.sent == [m.CancelRequest(2, 1)]

    tracked(test)


def test_deferred_request_is_cancelled_as_one_of_its_batch() -> None:
    def test(t: Tracked) -> None:
        _, (_, call) = t.batch("a", "b")
        t.receive(m.Response(1, 0, output()))
        t.receive(done(1, deferred=(1,)))
        call.cancel()
        assert t.sent == [m.CancelRequest(1, 1)]

    tracked(test)


def acknowledge_all(t: Tracked, call: Call, count: int, value: bytes = b"x") -> None:
    for _ in range(count):
        t.receive(m.Response(1, 0, output(value), final=False))
        response = t.responses["a"][-1]
        assert response is not None
        call.acknowledge_response(response)


def test_acknowledged_responses_are_reported_to_the_stub_in_groups() -> None:
    def test(t: Tracked) -> None:
        t.session.decoupled = True
        _, (call,) = t.batch("a")
        acknowledge_all(t, call, 31)
        assert t.sent == []
        acknowledge_all(t, call, 33)
        assert t.sent == [m.ResponseAck(1, 0, 32)] * 2

    tracked(test)


def test_acknowledged_responses_are_reported_to_the_stub_once_they_are_a_megabyte() -> None:
    def test(t: Tracked) -> None:
        t.session.decoupled = True
        _, (call,) = t.batch("a")
        acknowledge_all(t, call, 4, bytes(300_000))
        assert t.sent == [m.ResponseAck(1, 0, 4)]

    tracked(test)


def test_acknowledged_responses_of_a_slow_caller_are_reported_to_the_stub_without_delay() -> None:
    def test(t: Tracked) -> None:
        t.session.decoupled = True
        _, (call,) = t.batch("a")
        acknowledge_all(t, call, 3)
        assert t.sent == []
        for _ in range(2):
            t.now += 10**9
            acknowledge_all(t, call, 2)
        # The first one after a second is reported, together with those before it.
        assert t.sent == [m.ResponseAck(1, 0, 4), m.ResponseAck(1, 0, 2)]

    tracked(test)


def test_responses_of_a_sender_with_one_outstanding_response_are_reported_one_by_one() -> None:
    def test(t: Tracked) -> None:
        t.session.decoupled = True
        _, (call,) = t.batch("a", max_outstanding_responses=1)
        acknowledge_all(t, call, 3)
        assert t.sent == [m.ResponseAck(1, 0, 1)] * 3

    tracked(test)


def test_dead_stub_fails_the_batch_it_had_started_and_leaves_prefetched_ones_to_another() -> None:
    def test(t: Tracked) -> None:
        t.batch("started")
        _, prefetched = t.batch("prefetched")
        t.session.stub_exited("It was killed")
        assert t.error("started") == (
            ErrorCode.UNAVAILABLE,
            "It was killed while it ran this request.",
        )
        assert t.events == ["lost"]
        assert t.responses["prefetched"] == []
        assert list(t.session.drain_prefetched()) == prefetched
        assert not t.session.drain_prefetched()
        assert t.session.idle

    tracked(test)


def test_prefetched_calls_that_no_other_stub_takes_over_fail() -> None:
    def test(t: Tracked) -> None:
        t.batch("started")
        t.batch("prefetched")
        t.session.stub_exited("It was killed")
        t.session.fail_prefetched("It was killed")
        assert t.error("prefetched") == (
            ErrorCode.UNAVAILABLE,
            "It was killed before it had begun with this request.",
        )

    tracked(test)


def test_prefetched_batches_do_not_block_the_instance() -> None:
    def test(t: Tracked) -> None:
        assert t.session.blocking_batches == []
        t.batch("a")
        t.batch("b")
        assert t.session.blocking_batches == [1]
        t.receive(done(1))
        assert t.session.blocking_batches == [2]
        t.receive(m.InstanceReleased(2))
        assert t.session.blocking_batches == []

    tracked(test)


def test_only_small_requests_of_a_model_that_is_not_decoupled_are_prefetched() -> None:
    def call(*sizes: int) -> Call:
        return Call(InferRequest("m", [Tensor("x", "UINT8", [n], bytes(n)) for n in sizes]))

    def test(t: Tracked) -> None:
        half = INLINE_LIMIT // 2
        assert t.session.accepts_prefetch(call(INLINE_LIMIT))
        assert t.session.accepts_prefetch(call(half, half))
        assert not t.session.accepts_prefetch(call(half, half + 1))
        assert not t.session.accepts_prefetch(call(INLINE_LIMIT + 1))
        t.session.decoupled = True
        assert not t.session.accepts_prefetch(call(1))

    tracked(test)


def test_waiting_for_idle_ends_with_the_last_batch() -> None:
    async def test(t: Tracked) -> None:
        await t.session.wait_idle(DEADLINE)  # it is idle
        t.batch("a")
        t.batch("b")
        waiting = asyncio.ensure_future(t.session.wait_idle(DEADLINE))
        await asyncio.sleep(0)
        t.receive(done(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        t.receive(done(2))
        await waiting

    tracked(test)


def test_waiting_for_idle_gives_up_after_its_time_or_when_told() -> None:
    async def test(t: Tracked) -> None:
        t.batch("a")
        await t.session.wait_idle(0.001)
        waiting = asyncio.ensure_future(t.session.wait_idle(DEADLINE))
        await asyncio.sleep(0)
        t.session.skip_wait_idle()
        await waiting
        await t.session.wait_idle(DEADLINE)
        assert not t.session.idle

    tracked(test)


def test_batch_that_could_not_be_sent_ends_and_frees_the_instance() -> None:
    async def test(t: Tracked) -> None:
        ended = asyncio.Event()
        call = Call(InferRequest("m", [Tensor("x", "NO_SUCH_TYPE", [1], b"a")]))

        def done(batch: Batch, times: ExecutionTimes | None, released: bool) -> None:
            t.batch_done(batch, times, released)
            ended.set()

        t.session.run_batch(
            Batch(
                [call],
                lambda: None,
                done,
                t.count_batches,
            )
        )
        assert call.failed and t.events == []
        await ended.wait()
        assert t.events == ["lost", "released"]  # no execution is counted
        assert t.session.idle

    tracked(test)


def test_outputs_get_the_shape_that_the_client_knows() -> None:
    def test(t: Tracked) -> None:
        t.session.restore_shape = lambda tensor: Tensor(
            tensor.name, tensor.datatype, [1, *tensor.shape], tensor.data
        )
        t.batch("a")
        t.receive(m.Response(1, 0, output(b"abc")))
        (response,) = t.responses["a"]
        assert response is not None and response.outputs[0].shape == [1, 3]

    tracked(test)


def test_a_returned_batch_is_forgotten_and_its_call_goes_back() -> None:
    def test(t: Tracked) -> None:
        returned: list[Call] = []
        t.batch("runs")
        batch, calls = t.batch("ahead")
        batch.on_returned = returned.append
        t.receive(m.BatchReturned(2))
        assert returned == calls and not calls[0].finished
        t.receive(done(1))
        assert t.session.idle

    tracked(test)


def test_trace_of_a_prefetched_call_that_the_stub_does_not_run_ends_with_the_call() -> None:
    def reclaim(t: Tracked) -> None:
        assert len(t.session.reclaim_prefetched(1)) == 1

    def give_back(t: Tracked) -> None:
        t.receive(m.BatchReturned(2))

    def die(t: Tracked) -> None:
        t.session.stub_exited("It was killed")

    for end in (reclaim, give_back, die):

        def test(t: Tracked, end: Callable[[Tracked], None] = end) -> None:
            t.batch("runs")
            _, (call,) = t.batch("ahead", on_returned=lambda call: None)
            written: list[TraceTree] = []
            tree = TraceTree(written.append)
            call.request.trace = trace = Trace(lambda trace: 1, tree)
            trace.start_inference(call.request, "m", 1, 0)
            trace.start_compute()
            end(t)
            assert written == []  # the call may run elsewhere
            call.cancel()
            assert written == [tree], end.__name__

        tracked(test)


def test_only_a_prefetched_batch_may_be_returned() -> None:
    def test(t: Tracked) -> None:
        running, _ = t.batch("runs")
        running.on_returned = lambda call: None
        t.batch("was not sent to be returned")
        for number in (1, 2):
            assert "not prefetched" in str(t.refuse(m.BatchReturned(number)))
        assert isinstance(t.refuse(m.BatchReturned(3)), KeyError)

    tracked(test)


def test_returned_batch_of_several_calls_is_refused_without_an_effect() -> None:
    def test(t: Tracked) -> None:
        t.batch("runs")
        t.batch("ahead", "with it", on_returned=lambda call: None)
        assert "batch of 2 requests" in str(t.refuse(m.BatchReturned(2)))
        t.session.stub_exited("it has ended")
        t.session.fail_prefetched("it has ended")
        assert t.error("ahead")[0] is t.error("with it")[0] is ErrorCode.UNAVAILABLE

    tracked(test)


@pytest.mark.parametrize("times", [(16, 16, 16, 10), (-1, 0, 0, 0), (1, 3, 2, 4), (2, 1, 3, 4)])
def test_times_of_a_batch_that_run_backwards_are_refused_without_an_effect(
    times: tuple[int, int, int, int],
) -> None:
    def test(t: Tracked) -> None:
        t.batch("a")
        assert "times" in str(t.refuse(m.BatchDone(1, *times)))
        assert t.events == [] and t.session.running
        t.session.stub_exited("it has ended")
        assert t.error("a")[0] is ErrorCode.UNAVAILABLE

    tracked(test)


def test_only_requests_without_references_to_memory_can_be_reclaimed() -> None:
    def call(size: int, owner: object = None) -> Call:
        return Call(InferRequest("m", [Tensor("x", "UINT8", [size], bytes(size), owner)]))

    def test(t: Tracked) -> None:
        assert t.session.accepts_reclaimable(call(INLINE_ALWAYS))
        assert not t.session.accepts_reclaimable(call(INLINE_ALWAYS + 1))
        assert not t.session.accepts_reclaimable(call(1, owner=object()))
        placed = call(1)
        placed.request.output_placement = {"y": object()}
        assert not t.session.accepts_reclaimable(placed)
        t.session.runs_coroutines = True
        assert not t.session.accepts_reclaimable(call(1))
        t.session.runs_coroutines, t.session.decoupled = False, True
        assert not t.session.accepts_reclaimable(call(1))

    tracked(test)


def test_frames_that_came_together_take_effect_up_to_one_that_breaks_the_protocol() -> None:
    def test(t: Tracked) -> None:
        for name in "abcd":
            t.batch(name)
        frames: list[list[m.ToHost]] = [
            [m.Response(1, 0, output(b"1")), done(1)],
            [m.Response(2, 0, output(b"2")), done(2)],
            [m.Response(3, 0, output(b"3"))],
            [done(3), m.Hello()],
            [m.Response(4, 0, output(b"4")), done(4)],
        ]
        t.session.handle_frames([m.encode(messages) for messages in frames])
        assert [t.values(name) for name in "abcd"] == [[b"1"], [b"2"], [b"3"], []]
        assert t.events.count("done") == t.events.count("counted") == 3
        assert len(t.faults) == 1

    tracked(test)
