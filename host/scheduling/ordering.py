"""Responses in the order of the requests, whatever the order in which the model responds."""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec

from host.errors import HostError
from host.inference.call import Call
from host.inference.request import InferResponse


class OrderedCall(Call):
    """A call whose responses wait until every call before it in a `ResponseOrdering` has ended.

    Outside of an ordering it is an ordinary call. A cancelled call ends at once.
    """

    order: ResponseOrdering | None = None
    held: deque[tuple[InferResponse | None, bool]] = msgspec.field(default_factory=deque)
    answered: bool = False
    """Whether the last response is there; it may be held."""
    _taken_early: int = 0

    def respond(self, response: InferResponse | None, final: bool = True) -> None:
        """Passes a response on, now or in its turn."""
        order = self.order
        if order is None:
            super().respond(response, final)
        elif self.ended:
            super().respond(response, final)
            order.remove_call(self)
        elif not self.answered:
            self.held.append((response, final))
            if final:
                self.answered = True
                self.holder = None  # it waits for its turn, not for an instance
                self.request.inputs = []
            if order.first is self:
                order.release_responses()
            elif response is not None and not final:
                # The model may have to send more responses of this call before it gets to the first
                # one.
                super().acknowledge_response(response)
                self._taken_early += 1

    def acknowledge_response(self, response: InferResponse) -> None:
        """Called when the caller has processed a response that is not the last one."""
        if self._taken_early:
            self._taken_early -= 1
        else:
            super().acknowledge_response(response)

    def refuse(self, error: HostError) -> None:
        """Ends the call out of turn, as it will not run."""
        if self.order is not None:
            self.order.remove_call(self)
        self.fail(error)

    def release_oldest_response(self) -> None:
        """Passes the oldest held response on."""
        response, final = self.held.popleft()
        super().respond(response, final)
        if final and self.order is not None:
            self.order.remove_call(self)

    @property
    def blocking_call(self) -> Call | None:
        """The call that has to end before this one may respond; None if it may."""
        order = self.order
        return order.first if order is not None and order.first is not self else None


class ResponseOrdering:
    """Calls that have not ended, in the order in which they were added.

    Source: docs/reference/scheduling.md, "Order of responses".
    """

    def __init__(self) -> None:
        self.calls: OrderedDict[OrderedCall, None] = OrderedDict()
        self.first: OrderedCall | None = None
        """The call that may respond now."""
        self._releasing = False

    def add_call(self, call: OrderedCall) -> None:
        """Adds a call as the last one."""
        call.order = self
        self.calls[call] = None
        if self.first is None:
            self.first = call

    def remove_call(self, call: OrderedCall) -> None:
        """Removes a call; its held responses are dropped."""
        if call.order is self:
            call.order = None
            call.held.clear()
            del self.calls[call]
            if self.first is call:
                self.first = next(iter(self.calls), None)
                self.release_responses()

    def release_responses(self) -> None:
        """Passes on all responses whose turn it is; a loop, as there may be thousands."""
        if self._releasing:
            return  # called from within the loop below, which continues
        self._releasing = True
        try:
            while self.first is not None and self.first.held:
                self.first.release_oldest_response()
        finally:
            self._releasing = False
