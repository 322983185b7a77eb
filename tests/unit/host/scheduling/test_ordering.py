"""Responses keep the order of requests, and calls wait no longer than necessary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from host.errors import internal, unavailable
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse
from host.scheduling.dynamic import DynamicScheduler
from host.scheduling.ordering import OrderedCall, ResponseOrdering
from host.scheduling.queue import QueuePolicies, QueuePolicy
from host.scheduling.scheduler import Clock as AnyClock
from tests.unit.host.call_parties import RecordingHolder, RecordingListener
from tests.unit.host.scheduling.fake_instances import TICK, Clock, FakeInstanceSlot, same_kind
from tests.unit.host.scheduling.machine import SchedulerMachine


class Ordered(SchedulerMachine):
    """Several instances, detached batches, dead instances, rejections, cancellations."""

    largest = 3
    policies = QueuePolicies(default=QueuePolicy(timeout_us=6 * TICK // 1000))
    new_call: Callable[[InferRequest], Call] = OrderedCall

    @classmethod
    def make(cls, clock: AnyClock) -> DynamicScheduler:
        return DynamicScheduler(
            cls.largest, 0.0, same_kind, policies=cls.policies, keep_order=True, clock=clock
        )

    def has_ended(self, call: Call) -> bool:
        assert isinstance(call, OrderedCall)
        return call.finished or call.answered

    @invariant()
    def responses_leave_in_order_and_as_soon_as_they_may(self) -> None:
        all_before_have_ended = True
        for call in self.calls:
            heard = self.heard[call]
            if heard.ended and heard.error is not None:
                continue  # rejected or cancelled, or failed in order
            if all_before_have_ended:
                assert call.finished == self.has_ended(call)
                assert len(heard.responses) == self.sent.get(call, 0) + call.finished
            else:
                assert heard.responses == []
            all_before_have_ended = all_before_have_ended and self.has_ended(call)


TestOrdered = Ordered.TestCase
TestOrdered.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


class Asked:
    """Calls in an ordering, and their received responses: `name:text`, `name.` at the end."""

    def __init__(self, *names: str) -> None:
        self.order = ResponseOrdering()
        self.heard: list[str] = []
        self.calls = [self.send_request(name) for name in names]

    def send_request(self, name: str) -> OrderedCall:
        call = OrderedCall(InferRequest("m", [], id=name))

        def hear(response: InferResponse | None, final: bool) -> None:
            if response is not None:
                text = response.id if response.error is None else response.error.message
                self.heard.append(f"{name}:{text}")
            if final:
                self.heard.append(f"{name}.")

        call.subscribe(hear)
        self.order.add_call(call)
        return call


def answer(text: str = "ok") -> InferResponse:
    return InferResponse("m", 1, text)


def test_early_response_waits_for_earlier_calls() -> None:
    asked = Asked("a", "b", "c")
    a, b, c = asked.calls
    c.respond(answer())
    b.respond(answer())
    assert asked.heard == []
    assert not c.finished
    a.respond(answer())
    assert asked.heard == ["a:ok", "a.", "b:ok", "b.", "c:ok", "c."]
    assert a.finished and b.finished and c.finished


def test_responses_of_the_first_stream_are_not_held() -> None:
    asked = Asked("a", "b")
    a, b = asked.calls
    b.respond(answer("1"), final=False)
    a.respond(answer("1"), final=False)
    assert asked.heard == ["a:1"]
    a.respond(answer("2"), final=False)
    a.respond(None)
    assert asked.heard == ["a:1", "a:2", "a.", "b:1"]
    b.respond(answer("2"), final=False)
    b.respond(None)
    assert asked.heard[4:] == ["b:2", "b."]


def test_cancelled_call_ends_at_once_and_blocks_no_other_call() -> None:
    asked = Asked("a", "b", "c")
    a, b, c = asked.calls
    c.respond(answer())
    b.respond(answer())
    b.cancel()
    assert asked.heard == ["b:", "b."]
    a.cancel()
    assert asked.heard == ["b:", "b.", "a:", "a.", "c:ok", "c."]
    assert not asked.order.calls


def test_cancelling_a_held_response_does_not_inform_the_model() -> None:
    asked = Asked("a", "b")
    model = RecordingHolder(model_has_calls=True)
    asked.calls[1].holder = model
    asked.calls[1].respond(answer())
    asked.calls[1].cancel()
    assert model.cancelled == []
    assert not asked.calls[1].held, "a held response may be large"


def test_rejected_call_ends_out_of_order() -> None:
    asked = Asked("a", "b", "c")
    asked.calls[1].refuse(unavailable("too late"))
    assert asked.heard == ["b:too late", "b."]
    asked.calls[2].respond(answer())
    asked.calls[0].refuse(unavailable("too late"))
    assert asked.heard[2:] == ["c:ok", "c.", "a:too late", "a."]


def test_a_failure_of_the_model_keeps_its_place() -> None:
    asked = Asked("a", "b")
    asked.calls[1].fail(internal("broken"))
    assert asked.heard == []
    asked.calls[0].respond(answer())
    assert asked.heard == ["a:ok", "a.", "b:broken", "b."]
    assert asked.calls[1].failed


def test_responses_after_a_held_final_one_are_dropped() -> None:
    asked = Asked("a", "b")
    a, b = asked.calls
    b.respond(answer("1"))
    b.fail(internal("late"))
    b.respond(answer("2"), final=False)
    assert len(b.held) == 1
    a.respond(answer())
    assert asked.heard == ["a:ok", "a.", "b:1", "b."]


def test_caller_that_reacts_to_a_response_keeps_the_order() -> None:
    asked = Asked("a", "b", "c", "d")
    a, b, c, d = asked.calls
    for call in (d, b):
        call.respond(answer())
    c.respond(answer("1"), final=False)

    def react(call: Call) -> None:
        c.respond(answer("2"), final=False)
        d.cancel()
        asked.calls.append(asked.send_request("e"))
        asked.calls[-1].respond(answer())
        c.respond(answer("3"))

    a.listener = RecordingListener(react)
    a.respond(answer())
    assert asked.heard == [
        *("d:", "d."),
        *("a:ok", "a.", "b:ok", "b."),
        *("c:1", "c:2", "c:3", "c."),
        *("e:ok", "e."),
    ]


def test_any_number_of_answers_may_wait_for_one() -> None:
    count = 5000
    asked = Asked(*map(str, range(count)))
    for call in reversed(asked.calls):
        call.respond(answer())
    assert [text for text in asked.heard if text.endswith(".")] == [f"{n}." for n in range(count)]


def test_inputs_are_released_when_the_response_is_there() -> None:
    asked = Asked("a", "b")
    inputs = [object()]
    asked.calls[1].request.inputs = inputs  # type: ignore[assignment]  # any object will do
    asked.calls[1].respond(answer())
    assert asked.calls[1].request.inputs == []


def test_a_model_may_send_on_while_its_responses_are_held() -> None:
    """Otherwise the model might block on it and never reach the first request."""
    asked = Asked("a", "b")
    a, b = asked.calls
    taken: list[str] = []
    b.on_response_acknowledged = lambda response: taken.append(response.id)
    responses = [answer(str(number)) for number in range(4)]
    for response in responses[:2]:
        b.respond(response, final=False)
    assert taken == ["0", "1"]
    a.respond(answer())
    for response in responses[2:]:
        b.respond(response, final=False)
    for response in responses:
        b.acknowledge_response(response)
    assert taken == ["0", "1", "2", "3"]


def test_a_call_is_behind_the_one_that_may_respond_now() -> None:
    asked = Asked("a", "b", "c")
    a, b, c = asked.calls
    assert [call.blocking_call for call in asked.calls] == [None, a, a]
    b.cancel()
    assert [call.blocking_call for call in asked.calls] == [None, None, a]
    a.respond(answer())
    assert c.blocking_call is None


def test_outside_of_an_ordering_it_is_a_call_like_any_other() -> None:
    call = OrderedCall(InferRequest("m", []))
    call.respond(answer())
    assert call.finished


@pytest.mark.parametrize("early", [False, True])
def test_order_is_kept_over_several_instances(early: bool) -> None:
    clock = Clock()
    scheduler = DynamicScheduler(1, 0.0, same_kind, keep_order=True, clock=clock)
    instances = [FakeInstanceSlot(scheduler) for _ in range(3)]
    for instance in instances:
        scheduler.instance_ready(instance)
    heard: list[int] = []

    def hear(number: int, response: InferResponse | None, final: bool) -> None:
        heard.append(number)

    calls = [OrderedCall(InferRequest("m", [])) for _ in range(6)]
    for number, call in enumerate(calls):
        call.subscribe(partial(hear, number))
        scheduler.submit(call)
    while scheduler.queued or any(instance.running or instance.loose for instance in instances):
        for instance in instances:
            if instance.running:
                (instance.let_go if early else instance.finish)()
            for loose in reversed(instance.loose):
                loose.respond(answer())
            instance.loose.clear()
    assert heard == list(range(6))
