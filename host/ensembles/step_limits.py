"""Limits of an ensemble: requests in flight per step, and how far decoupled steps run ahead."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sized

from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse
from host.scheduling.scheduler import Clock, LoopClock, Timer

_MAX_SENT_RESPONSES, _MAX_SENT_BYTES = 128, 4 << 20
"""Responses, and their bytes, that were sent to the caller and not acknowledged."""

_MAX_WAITING_STEPS = 256
"""Steps in progress: more than the responses that step models may have outstanding."""


class ResponseCredit:
    """A response of a step, until every use of its tensors has ended."""

    __slots__ = ("_call", "_flow_control", "_response", "_uses")

    def __init__(
        self, flow_control: FlowControl, call: Call, response: InferResponse, uses: int
    ) -> None:
        self._flow_control = flow_control
        self._call = call
        self._response = response
        self._uses = uses

    def release(self, uses: int = 1) -> None:
        """Ends `uses` uses of the response."""
        self._uses -= uses
        if not self._uses:
            self._flow_control.credit_released(self)

    def acknowledge(self) -> None:
        """Lets the step model send its next response."""
        self._call.acknowledge_response(self._response)


class FlowControl:
    """Acknowledges responses of steps; `under_way`: the steps in progress of this request.

    Without `max_inflight_requests`, a response is acknowledged when the steps that use it have
    ended, so that a step model runs ahead by its usual number of outstanding responses. With it, a
    response is acknowledged as soon as no step waits for a permit, and a step model may have one
    outstanding response: it stops as soon as a step waits
    (docs/reference/ensembles.md, "Execution"). The same holds if the caller is
    an ensemble with that limit.
    """

    def __init__(self, request: InferRequest, limited: bool, under_way: Sized) -> None:
        self.max_outstanding_responses = 1 if limited or request.max_outstanding_responses else 0
        """Outstanding responses that each step model may have; 0: its default."""
        self._under_way = under_way
        self._max_sent_responses = request.max_outstanding_responses or _MAX_SENT_RESPONSES
        # Bytes of responses that the caller has not acknowledged, by identity.
        self._sent: dict[int, int] = {}
        self._bytes = 0
        self._waiting = 0
        self._unacknowledged: deque[ResponseCredit] = deque()
        self._free = False

    def tensors_used(self, credit: ResponseCredit, used: bool) -> None:
        """Called when the steps that use a response were started, or wait for permits."""
        if self.max_outstanding_responses or not used:
            self._acknowledge(credit)

    def credit_released(self, credit: ResponseCredit) -> None:
        """Called when the last use of a response has ended."""
        if not self.max_outstanding_responses:
            self._acknowledge(credit)

    def step_waits(self) -> None:
        """Called when a step starts to wait for a permit."""
        self._waiting += 1

    def step_stops_waiting(self) -> None:
        """Called when that step has its permit, or no longer needs it."""
        self._waiting -= 1
        self.acknowledge_waiting()

    def response_sent(self, response: InferResponse) -> None:
        """Called when a response goes to the caller, which will acknowledge it."""
        size = sum(len(output.data) for output in response.outputs)
        self._sent[id(response)] = size
        self._bytes += size

    def response_acknowledged(self, response: InferResponse) -> None:
        """Called when the caller has acknowledged a response."""
        self._bytes -= self._sent.pop(id(response), 0)
        self.acknowledge_waiting()

    def release_all(self) -> None:
        """Acknowledges everything from now on, so that step models can finish."""
        self._free = True
        self.acknowledge_waiting()

    def acknowledge_waiting(self) -> None:
        """Acknowledges the responses that wait for it, unless a limit is reached."""
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


_log = logging.getLogger("pbhost")

_MAX_WAIT_NS = 300 * 1_000_000_000
"""A permit is granted after this time, whatever is in flight.

Source: docs/reference/ensembles.md, "Execution".
"""


class Permit:
    """The permit of one step execution, held from its start to `release_permit`."""

    __slots__ = ("start", "step", "timer", "waits")

    def __init__(self, step: int, start: Callable[[], None]) -> None:
        self.step = step
        self.start = start
        self.timer: Timer | None = None
        self.waits = False


class InflightLimiter:
    """Grants at most `most` permits for each step, over all requests of ensemble `name`.

    Further requests for permits wait, first come, first served.
    """

    def __init__(self, name: str, most: int, clock: Clock | None = None) -> None:
        self._name = name
        self._most = most
        self._clock = LoopClock() if clock is None else clock
        self._under_way: Counter[int] = Counter()
        self._waiting: dict[int, OrderedDict[Permit, None]] = {}
        self._serving: set[int] = set()

    def request_permit(self, permit: Permit) -> None:
        """Grants the permit now, or as soon as it is free."""
        step = permit.step
        if self._under_way[step] < self._most and not self._waiting.get(step):
            self._under_way[step] += 1
            permit.start()
        else:
            permit.waits = True
            permit.timer = self._clock.call_later(_MAX_WAIT_NS, lambda: self._start_overdue(permit))
            self._waiting.setdefault(step, OrderedDict())[permit] = None

    def release_permit(self, permit: Permit) -> None:
        """Returns a permit, or withdraws a request for one."""
        if permit.waits:
            self._remove_waiting(permit)
            return
        self._under_way[permit.step] -= 1
        self._start_waiting(permit.step)

    def _start_waiting(self, step: int) -> None:
        """Grants free permits, in a loop: a start may fail at once and return its permit."""
        if step in self._serving:
            return
        self._serving.add(step)
        try:
            waiting = self._waiting.get(step)
            while waiting and self._under_way[step] < self._most:
                self._start(next(iter(waiting)))
        finally:
            self._serving.discard(step)

    def _start(self, permit: Permit) -> None:
        self._remove_waiting(permit)
        self._under_way[permit.step] += 1
        permit.start()

    def _remove_waiting(self, permit: Permit) -> None:
        del self._waiting[permit.step][permit]
        permit.waits = False
        if permit.timer is not None:
            permit.timer.cancel()
            permit.timer = None

    def _start_overdue(self, permit: Permit) -> None:
        if not permit.waits:
            return
        _log.error(
            "ensemble '%s': a request of step %d waited %d s for one of %d running requests to"
            " finish; continuing without it. Raise 'max_inflight_requests', or find out why they"
            " do not finish",
            self._name, permit.step, _MAX_WAIT_NS // 1_000_000_000, self._under_way[permit.step],
        )  # fmt: skip
        self._start(permit)
