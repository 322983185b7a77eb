"""Responses in the order of the requests, whatever order a model gives them in."""

from __future__ import annotations

from collections import OrderedDict, deque

from host.errors import HostError
from host.inference.request import Call, InferRequest, InferResponse


class OrderedCall(Call):
    """A call whose responses wait until every call before it in an `Ordering` has ended.

    Outside of an ordering it is like any other. One that is cancelled ends at once.
    """

    __slots__ = ("order", "held", "answered", "_taken_early")

    def __init__(self, request: InferRequest) -> None:
        super().__init__(request)
        self.order: ResponseOrdering | None = None
        self.held: deque[tuple[InferResponse | None, bool]] = deque()
        self.answered = False  # the last response is there, and perhaps held
        self._taken_early = 0

    def respond(self, response: InferResponse | None, final: bool = True) -> None:
        """Pass the response on, now or in its turn."""
        order = self.order
        if order is None:
            super().respond(response, final)
        elif self.cancelled:
            super().respond(response, final)
            order.remove_call(self)
        elif not self.answered:
            self.held.append((response, final))
            if final:
                self.answered = True
                self.holder = self.on_cancel = None  # it waits for its turn, and for no instance
                self.request.inputs = []
            if order.first is self:
                order.release_responses()
            elif response is not None and not final:
                # The model may have to send more of this one before it gets to the first one.
                super().acknowledge_response(response)
                self._taken_early += 1

    def acknowledge_response(self, response: InferResponse) -> None:
        """The asker is done with a response that was not the last one."""
        if self._taken_early:
            self._taken_early -= 1
        else:
            super().acknowledge_response(response)

    def refuse(self, error: HostError) -> None:
        """End the call out of turn: it has not been run, and nobody waits for it in vain."""
        if self.order is not None:
            self.order.remove_call(self)
        self.fail(error)

    def release_oldest_response(self) -> None:
        """Pass on the oldest response that is held."""
        response, final = self.held.popleft()
        super().respond(response, final)
        if final and self.order is not None:
            self.order.remove_call(self)

    @property
    def blocking_call(self) -> Call | None:
        """The call that may respond now, if this one has to wait for it."""
        order = self.order
        return order.first if order is not None and order.first is not self else None


class ResponseOrdering:
    """Calls that have not ended, in the order in which they entered (configuration spec 4.4)."""

    def __init__(self) -> None:
        self.calls: OrderedDict[OrderedCall, None] = OrderedDict()
        self.first: OrderedCall | None = None
        """The call that may respond now."""
        self._releasing = False

    def add_call(self, call: OrderedCall) -> None:
        """Give the call the last place."""
        call.order = self
        self.calls[call] = None
        if self.first is None:
            self.first = call

    def remove_call(self, call: OrderedCall) -> None:
        """Take the call's place away; what it still holds is dropped."""
        if call.order is self:
            call.order = None
            call.held.clear()
            del self.calls[call]
            if self.first is call:
                self.first = next(iter(self.calls), None)
                self.release_responses()

    def release_responses(self) -> None:
        """Let those respond whose turn has come: a loop, for one may be followed by thousands."""
        if self._releasing:
            return  # whoever hears of a response has caused this: the loop below goes on
        self._releasing = True
        try:
            while self.first is not None and self.first.held:
                self.first.release_oldest_response()
        finally:
            self._releasing = False
