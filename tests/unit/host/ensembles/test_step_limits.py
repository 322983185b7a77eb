"""Limits of an ensemble: requests in flight per step, and how far decoupled steps run ahead."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from host.ensembles.step_limits import FlowControl, InflightLimiter, Permit, ResponseCredit
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, Tensor
from tests.unit.host.scheduling.fake_instances import TICK, Clock


class Sent:
    """Responses of one member, in the order of their acknowledgements."""

    def __init__(self, limited: bool = False, window: int = 0) -> None:
        self.steps: set[int] = set()
        self.flow_control = FlowControl(
            InferRequest("e", [], max_outstanding_responses=window), limited, self.steps
        )
        self.taken: list[str] = []
        self._call = Call(InferRequest("m", []))
        self._call.on_response_acknowledged = lambda response: self.taken.append(response.id)

    def send(self, name: str, uses: int = 1, waits: bool = False) -> ResponseCredit:
        credit = ResponseCredit(self.flow_control, self._call, InferResponse("m", 1, name), uses)
        if waits:
            self.flow_control.step_waits()
        self.flow_control.tensors_used(credit, uses > 0)
        return credit

    def give(self, size: int = 1) -> InferResponse:
        response = InferResponse("e", 1)
        response.outputs = [Tensor("a", "INT8", [size], bytes(size))]
        self.flow_control.response_sent(response)
        return response


def test_without_a_limit_a_response_is_taken_when_its_last_user_is_done() -> None:
    sent = Sent()
    credit = sent.send("a", uses=3)
    credit.release()
    credit.release()
    assert not sent.taken and sent.flow_control.max_outstanding_responses == 0
    credit.release()
    assert sent.taken == ["a"]


def test_an_unused_response_is_taken_at_once() -> None:
    sent = Sent()
    sent.send("a", uses=0)
    assert sent.taken == ["a"]


def test_with_a_limit_it_is_taken_unless_a_step_waits() -> None:
    sent = Sent(limited=True)
    first = sent.send("a")
    second = sent.send("b", waits=True)
    third = sent.send("c", uses=0)
    assert sent.taken == ["a"] and sent.flow_control.max_outstanding_responses == 1
    for credit in (first, second):
        credit.release()  # that is known already, or of no account
    assert sent.taken == ["a"]
    sent.flow_control.step_stops_waiting()
    assert sent.taken == ["a", "b", "c"]
    del third


def test_members_are_held_up_by_responses_that_the_client_has_not_taken() -> None:
    sent = Sent()
    given = [sent.give() for _ in range(128)]
    sent.send("a").release()
    assert not sent.taken
    sent.flow_control.response_acknowledged(given[0])
    assert sent.taken == ["a"]


def test_members_are_held_up_by_their_bytes() -> None:
    sent = Sent()
    large = sent.give(4 << 20)
    sent.send("a").release()
    assert not sent.taken
    sent.flow_control.response_acknowledged(large)
    assert sent.taken == ["a"]


def test_a_client_with_a_window_holds_members_up_by_it() -> None:
    sent = Sent(window=1)
    sent.send("a")
    assert sent.taken == ["a"] and sent.flow_control.max_outstanding_responses == 1
    given = sent.give()
    sent.send("b")
    assert sent.taken == ["a"]
    sent.flow_control.response_acknowledged(given)
    assert sent.taken == ["a", "b"]


def test_members_are_held_up_by_steps_further_on() -> None:
    sent = Sent()
    sent.steps.update(range(257))
    sent.send("a").release()
    assert not sent.taken
    sent.steps.pop()
    sent.flow_control.acknowledge_waiting()
    assert sent.taken == ["a"]


def test_after_a_failure_no_member_is_held_up() -> None:
    sent = Sent(limited=True)
    sent.send("a", waits=True)
    sent.flow_control.release_all()
    sent.send("b", waits=True)
    assert sent.taken == ["a", "b"]


PATIENCE = 300 * 10**9 // TICK


class Starts:
    """The steps that have started, in order."""

    def __init__(self, most: int) -> None:
        self.clock = Clock()
        self.limiter = InflightLimiter("e", most, self.clock)
        self.made: list[int] = []

    def enter(self, number: int, step: int = 0) -> Permit:
        permit = Permit(step, partial(self.made.append, number))
        self.limiter.request_permit(permit)
        return permit


def test_no_more_steps_than_allowed_run_and_the_oldest_is_next() -> None:
    starts = Starts(2)
    permits = [starts.enter(number) for number in range(5)]
    assert starts.made == [0, 1]
    starts.limiter.release_permit(permits[1])
    assert starts.made == [0, 1, 2]
    starts.limiter.release_permit(permits[0])
    starts.limiter.release_permit(permits[2])
    assert starts.made == [0, 1, 2, 3, 4]
    for permit in permits[3:]:
        starts.limiter.release_permit(permit)
    starts.enter(5)
    assert starts.made[-1] == 5
    assert starts.clock.armed == 0


def test_each_step_has_its_own_limit() -> None:
    starts = Starts(1)
    starts.enter(0, step=0)
    starts.enter(1, step=1)
    starts.enter(2, step=0)
    assert starts.made == [0, 1]


def test_one_that_is_given_up_while_it_waits_is_never_started() -> None:
    starts = Starts(1)
    first, second, third = (starts.enter(number) for number in range(3))
    starts.limiter.release_permit(second)
    starts.limiter.release_permit(first)
    assert starts.made == [0, 2]
    starts.limiter.release_permit(third)
    assert starts.clock.armed == 0


def test_thousands_that_fail_at_once_do_not_pile_up() -> None:
    starts = Starts(1)
    first = starts.enter(-1)
    permits: list[Permit] = []

    def fail(number: int) -> None:
        starts.made.append(number)
        starts.limiter.release_permit(permits[number])

    for number in range(5000):
        permits.append(Permit(0, partial(fail, number)))
        starts.limiter.request_permit(permits[-1])
    starts.limiter.release_permit(first)
    assert starts.made == [-1, *range(5000)]


def test_after_five_minutes_one_goes_ahead_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts = Starts(1)
    starts.enter(0)
    starts.clock.advance(5)
    waiting = starts.enter(1)
    with caplog.at_level(logging.ERROR, "pbhost"):
        starts.clock.ticks += PATIENCE - 1
        starts.clock.run_due()
        assert starts.made == [0]
        starts.clock.ticks += 1
        starts.clock.run_due()
    assert starts.made == [0, 1]
    assert "a request of step 0 waited 300 s for one of 1 running requests" in caplog.text
    starts.enter(2)
    starts.limiter.release_permit(waiting)
    assert starts.made == [0, 1]  # the step that does not end still runs
