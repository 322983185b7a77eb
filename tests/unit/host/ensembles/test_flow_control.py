"""When a decoupled member hears that its response was taken."""

from __future__ import annotations

from host.ensembles.flow_control import FlowControl, ResponseCredit
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, Tensor


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
