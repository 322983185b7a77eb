"""How far decoupled members of one request may be ahead of those that take their responses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sized

from host.inference.request import Call, InferRequest, InferResponse

_MAX_SENT_RESPONSES, _MAX_SENT_BYTES = 128, 4 << 20
"""Responses, or bytes of them, that are under way to whoever has asked, who has not taken them."""

_MAX_WAITING_STEPS = 256
"""Steps under way: more than members have responses under way to the steps right after them."""


class ResponseCredit:
    """A member's response, until all that use its tensors are done with it."""

    __slots__ = ("_call", "_flow_control", "_response", "_uses")

    def __init__(
        self, flow_control: FlowControl, call: Call, response: InferResponse, uses: int
    ) -> None:
        self._flow_control = flow_control
        self._call = call
        self._response = response
        self._uses = uses

    def release(self, uses: int = 1) -> None:
        """So many of them are done."""
        self._uses -= uses
        if not self._uses:
            self._flow_control.credit_released(self)

    def acknowledge(self) -> None:
        """The member may send its next response."""
        self._call.acknowledge_response(self._response)


class FlowControl:
    """Lets the members of a request send on; `under_way` are the steps of it that are.

    Without a limit on steps, a member may be as far ahead as its max_outstanding_responses allows: a response is taken
    when the steps that use it have ended. With one, a response is taken as soon as no step waits
    for its turn, and no other one is under way before that: so the member is held up as soon as
    one waits (configuration spec 6.3). It is the same if an ensemble with a limit has asked.
    """

    def __init__(self, request: InferRequest, limited: bool, under_way: Sized) -> None:
        self.max_outstanding_responses = 1 if limited or request.max_outstanding_responses else 0
        """What members are asked with: responses under way at a time; 0 for what is usual."""
        self._under_way = under_way
        self._max_sent_responses = request.max_outstanding_responses or _MAX_SENT_RESPONSES
        self._sent: dict[int, int] = {}  # responses that the asker has not taken: their bytes
        self._bytes = 0
        self._waiting = 0
        self._unacknowledged: deque[ResponseCredit] = deque()
        self._free = False

    def tensors_used(self, credit: ResponseCredit, used: bool) -> None:
        """What uses a response has been started, or waits for its turn."""
        if self.max_outstanding_responses or not used:
            self._acknowledge(credit)

    def credit_released(self, credit: ResponseCredit) -> None:
        """Nobody uses a response any more."""
        if not self.max_outstanding_responses:
            self._acknowledge(credit)

    def step_waits(self) -> None:
        """A step has to wait for its turn."""
        self._waiting += 1

    def step_stops_waiting(self) -> None:
        """It has got it, or need not wait any more."""
        self._waiting -= 1
        self.acknowledge_waiting()

    def response_sent(self, response: InferResponse) -> None:
        """A response goes to the asker, who will say that it was taken."""
        size = sum(len(output.data) for output in response.outputs)
        self._sent[id(response)] = size
        self._bytes += size

    def response_acknowledged(self, response: InferResponse) -> None:
        """The asker has taken it."""
        self._bytes -= self._sent.pop(id(response), 0)
        self.acknowledge_waiting()

    def release_all(self) -> None:
        """What comes from now on is of no use: members are to come to their ends."""
        self._free = True
        self.acknowledge_waiting()

    def acknowledge_waiting(self) -> None:
        """Tell the members whose responses are taken, if nothing stands against it any more."""
        while self._unacknowledged and (self._free or not self._is_blocked):
            self._unacknowledged.popleft().acknowledge()

    def _acknowledge(self, credit: ResponseCredit) -> None:
        self._unacknowledged.append(credit)
        self.acknowledge_waiting()

    @property
    def _is_blocked(self) -> bool:
        return (
            self._waiting > 0
            or len(self._sent) >= self._max_sent_responses
            or self._bytes >= _MAX_SENT_BYTES
            or len(self._under_way) > _MAX_WAITING_STEPS
        )
