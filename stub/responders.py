"""Answers that leave one by one: the responders of a stub, and what senders do with them."""

import threading
import time
from collections import deque
from typing import Callable, Deque, List, Mapping, Optional, Sequence, Set, Tuple
from weakref import WeakValueDictionary

import pb_utils
from pb_utils._sender import Responder
from stub.channel import Channel
from stub.conversion import error_response, response_to_wire
from stub.memory import StubMemory
from stub.wire.arena import Block
from stub.wire.messages import (
    Initialize,
    Response,
    ToHost,
)
from stub.wire.payload import (
    OutputPlacement,
    WireResponse,
    WireTensor,
)

_MAX_OUTSTANDING_BYTES = 4 << 20
"""Responses of one request that its caller has not taken yet: a sender waits beyond that."""

_EVENT_LOOP_FACTOR = 16
"""So many times more for a sender on an event loop: its wait holds up every other coroutine."""


_HeldResponse = Tuple[WireResponse, List[Block]]
"""A response, and what it refers to."""


class ResponderRegistry:
    """Every responder that may still be answered; any thread may call.

    `wake` has `take_responses_to_dropped_requests`
    called soon, by a thread that may send.
    """

    def __init__(self, channel: Channel, memory: StubMemory, wake: Callable[[], None]) -> None:
        self.channel = channel
        self.memory = memory
        self.send_timeout = 60.0
        self.max_outstanding_responses = 128  # responses of one request under way
        self.loop_thread: Optional[int] = None  # where waiting is worst
        self._name = ""
        self._wake = wake
        self._current_responders: Sequence[StubResponder] = ()
        self._late_responders: WeakValueDictionary[Tuple[int, int], StubResponder] = (
            WeakValueDictionary()
        )
        self._dropped: Deque[Tuple[int, int, Optional[_HeldResponse]]] = deque()
        self._last_batch = 0
        self._batch_lock = threading.Lock()
        self._cancelled_early: Set[Tuple[int, int]] = (
            set()
        )  # cancelled before their batch has begun

    def configure(self, message: Initialize) -> None:
        """The instance is known, and how long a sender may wait."""
        self._name = message.instance_name
        self.max_outstanding_responses = max(1, message.max_outstanding_responses)
        self.send_timeout = message.send_timeout

    def set_loop_thread(self, thread: int) -> None:
        """That thread runs an event loop."""
        self.loop_thread = thread

    def begin_batch(self, batch: int, responders: "Sequence[StubResponder]") -> None:
        """These are answered from now on; those cancelled already are told so."""
        with self._batch_lock:
            self._current_responders = responders
            self._last_batch = batch
            if self._cancelled_early:
                for responder in responders:
                    if (batch, responder.index) in self._cancelled_early:
                        responder.cancel()
                self._cancelled_early = {key for key in self._cancelled_early if key[0] > batch}

    def end_batch(self, responders: "Sequence[StubResponder]") -> List[int]:
        """The main thread has left the batch; the indexes that are still to be answered."""
        late: List[int] = []
        for responder in responders:
            if not responder.closed:
                self._late_responders[responder.batch, responder.index] = responder
                late.append(responder.index)
        if responders is self._current_responders:
            self._current_responders = ()
        return late

    def cancel_request(self, batch: int, index: int) -> None:
        """The caller of that request has gone."""
        with self._batch_lock:
            if batch > self._last_batch:
                self._cancelled_early.add((batch, index))
                return
        responder = self._find_responder(batch, index)
        if responder is not None:
            responder.cancel()

    def acknowledge_responses(self, batch: int, index: int, count: int) -> None:
        """The caller of that request has taken responses."""
        responder = self._find_responder(batch, index)
        if responder is not None:
            responder.acknowledge_responses(count)

    def _find_responder(self, batch: int, index: int) -> "Optional[StubResponder]":
        for responder in self._current_responders:
            if responder.batch == batch and responder.index == index:
                return responder
        return self._late_responders.get((batch, index))

    def on_responder_dropped(self, batch: int, index: int, held: Optional[_HeldResponse]) -> None:
        """Nobody can answer that request any more. Called by finalisers: waits for nothing."""
        self._dropped.append((batch, index, held))
        self._wake()

    def take_responses_to_dropped_requests(self, exported: List[Block]) -> List[ToHost]:
        """The answers to requests that were dropped since the last call; `exported` as usual."""
        answers: List[ToHost] = []
        while self._dropped:
            batch, index, held = self._dropped.popleft()
            answers.append(
                Response(
                    batch,
                    index,
                    self.export_held_response(held, exported) or self.no_response_error(),
                )
            )
        return answers

    def export_held_response(
        self, held: Optional[_HeldResponse], exported: List[Block]
    ) -> Optional[WireResponse]:
        """A response that is about to be sent after all, if there is one."""
        if held is None:
            return None
        response, blocks = held
        self.memory.export_blocks(blocks)
        exported.extend(blocks)
        return response

    def no_response_error(self) -> WireResponse:
        """The answer to a request for which the model has none."""
        return error_response(
            f"Model instance '{self._name}' returned no response for this request and let go of"
            " it: `execute` must return one InferenceResponse for each request, or its response"
            " sender must send the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL"
        )


class _ResponseCredit:
    """What was sent to one caller, and what it has taken of that.

    Each figure is changed by one thread only: those of what was sent by whoever has the responder's
    lock, those of what was taken by the service thread.
    """

    __slots__ = ("changed", "sent", "sent_bytes", "sizes", "acknowledged", "acknowledged_bytes")

    def __init__(self) -> None:
        self.sizes: Deque[int] = deque()
        self.sent = self.sent_bytes = 0
        self.acknowledged = self.acknowledged_bytes = 0
        self.changed = threading.Event()  # something has changed for the better

    def add_sent(self, size: int) -> None:
        self.sizes.append(size)
        self.sent_bytes += size
        self.sent += 1

    def remove_last_sent(self) -> None:
        """The last one was not sent after all."""
        self.sent_bytes -= self.sizes.pop()
        self.sent -= 1

    def acknowledge(self, count: int) -> None:
        for _ in range(min(count, len(self.sizes))):
            self.acknowledged_bytes += self.sizes.popleft()
        self.acknowledged += count
        self.changed.set()

    def is_exhausted(self, responses: int, size: int) -> bool:
        waiting = self.sent - self.acknowledged
        return waiting > 0 and (
            waiting >= responses or self.sent_bytes - self.acknowledged_bytes >= size
        )


class StubResponder(Responder):
    """One request of a batch."""

    __slots__ = (
        "_credit",
        "_held_response",
        "_registry",
        "batch",
        "cancelled",
        "index",
        "requested_outputs",
        "output_placement",
        "max_outstanding_responses",
    )

    def __init__(
        self,
        registry: ResponderRegistry,
        batch: int,
        index: int,
        decoupled: bool,
        requested_outputs: Sequence[str],
        output_placement: Optional[Mapping[str, OutputPlacement]] = None,
        max_outstanding_responses: int = 0,
    ) -> None:
        """`requested_outputs` are those that the caller wants, `output_placement` where it wants
        some of them.

        `max_outstanding_responses` is how many responses may be under way to it, 0 for as many
        as to any other.
        """
        super().__init__(decoupled)
        self.batch = batch
        self.index = index
        self.cancelled = False
        self.requested_outputs = requested_outputs
        self.output_placement = output_placement
        self.max_outstanding_responses = max_outstanding_responses
        self._registry = registry
        self._held_response: Optional[_HeldResponse] = None  # sent, but not as the last one
        self._credit: Optional[_ResponseCredit] = (
            None  # of a decoupled request that has got a response
        )

    def __del__(self) -> None:
        if not self.closed:
            self._registry.on_responder_dropped(self.batch, self.index, self._held_response)

    def to_wire(self, response: pb_utils.InferenceResponse, exported: List[Block]) -> WireResponse:
        """A response as the caller is to get it; `exported` as in `tensor_to_wire`."""
        return response_to_wire(
            response, self.requested_outputs, self._registry.memory, exported, self.output_placement
        )

    def take_held_response(self, exported: List[Block]) -> Optional[WireResponse]:
        """What an ordinary model has sent without the flag that ends the request."""
        held, self._held_response = self._held_response, None
        return self._registry.export_held_response(held, exported)

    def is_cancelled(self) -> bool:
        """Whether the caller has gone."""
        return self.cancelled

    def cancel(self) -> None:
        """The caller has gone: from now on nothing waits for it."""
        self.cancelled = True
        if self._credit is not None:
            self._credit.changed.set()

    def acknowledge_responses(self, count: int) -> None:
        """The caller has taken so many responses; the service thread only."""
        if self._credit is not None:
            self._credit.acknowledge(count)

    def _wait_for_credit(self) -> None:
        credit = self._credit
        if credit is None:
            return
        registry = self._registry
        factor = _EVENT_LOOP_FACTOR if threading.get_ident() == registry.loop_thread else 1
        max_responses = (
            self.max_outstanding_responses or registry.max_outstanding_responses * factor
        )
        limits = max_responses, _MAX_OUTSTANDING_BYTES * factor
        if not credit.is_exhausted(*limits):
            return
        deadline = time.monotonic() + registry.send_timeout
        while True:
            credit.changed.clear()
            if self.cancelled or self.closed or not credit.is_exhausted(*limits):
                return
            if not credit.changed.wait(max(0.0, deadline - time.monotonic())):
                raise pb_utils.TritonModelException(
                    f"Unable to send response. For {registry.send_timeout:g} seconds the caller has"
                    f" taken none of {credit.sent - credit.acknowledged} earlier responses, which"
                    f" are {credit.sent_bytes - credit.acknowledged_bytes} bytes."
                )

    def _send_response(self, response: Optional[pb_utils.InferenceResponse], final: bool) -> None:
        exported: List[Block] = []
        wire: Optional[WireResponse] = None
        if response is not None:
            wire = self.to_wire(response, exported)
        if not self.decoupled:
            # The caller gets one message, and it is the last one.
            if not final:
                assert wire is not None
                self._held_response = wire, exported
                return
            if wire is None and self._held_response is not None:
                wire, exported = self._held_response
                self._held_response = None
            # Its client may change its memory now, and `execute` goes on.
            self._registry.memory.views.detach_from_client_regions()
        self._registry.memory.export_blocks(exported)
        if wire is not None and not final:
            if self._credit is None:
                self._credit = _ResponseCredit()
            self._credit.add_sent(sum(_wire_nbytes(output) for output in wire.outputs))
        try:
            self._registry.channel.send([Response(self.batch, self.index, wire, final)])
        except (TypeError, ValueError, OverflowError) as error:  # it cannot be put into a message
            self._registry.memory.cancel_export(exported)
            if self._credit is not None and wire is not None and not final:
                self._credit.remove_last_sent()
            raise pb_utils.TritonModelException(
                f"Unable to send response. It cannot be put into a message: {error!r}"
            ) from error


def _wire_nbytes(output: WireTensor) -> int:
    return len(output.data) if output.data is not None else output.size
