"""Sends the responses of response senders, with a limit on outstanding responses."""

import threading
import time
from collections import deque
from typing import Callable, Deque, List, Mapping, Optional, Sequence, Set, Tuple
from weakref import WeakValueDictionary

import pb_utils
from pb_utils._model_code import describe_undeclared
from pb_utils._model_texts import limit_text
from pb_utils._response import Responder
from stub.conversion import error_response, response_to_wire
from stub.memory import StubMemory
from stub.stub_channel import Channel
from stub.wire.arena import Block
from stub.wire.messages import (
    Initialize,
    LogLine,
    ModelWarning,
    OutputPlacement,
    Response,
    ToHost,
    WireResponse,
    WireTensor,
)

_MAX_OUTSTANDING_BYTES = 4 << 20
"""A sender waits while its client has not acknowledged this many bytes of responses."""

_WARNING = 1  # the level of log lines

_EVENT_LOOP_FACTOR = 16
"""Multiplies the limits on an event loop, where waiting blocks all coroutines."""


_HeldResponse = Tuple[WireResponse, List[Block]]
"""A response, and the blocks that it refers to."""


def _quote(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


class ResponderRegistry:
    """The responders of requests without a final response; any thread may call.

    `wake` wakes the service thread, which calls `take_responses_to_dropped_requests`.
    """

    def __init__(self, channel: Channel, memory: StubMemory, wake: Callable[[], None]) -> None:
        self.channel = channel
        self.memory = memory
        self.send_timeout = 60.0
        self.max_outstanding_responses = 128  # per request
        self.loop_thread: Optional[int] = None  # where waiting blocks all coroutines
        self._name = self._model_name = ""
        self._declared_outputs: Sequence[str] = ()
        self._strict = False
        self._wake = wake
        self._current_responders: Sequence[StubResponder] = ()
        self._late_responders: WeakValueDictionary[Tuple[int, int], StubResponder] = (
            WeakValueDictionary()
        )
        self._dropped: Deque[Tuple[int, int, Optional[_HeldResponse]]] = deque()
        self._last_batch = 0
        self._batch_lock = threading.Lock()
        self._cancelled_early: Set[Tuple[int, int]] = set()  # before their batch began
        self._warned_of: Set[str] = set()  # outputs that were dropped

    def configure(self, message: Initialize, strict: bool) -> None:
        """Sets what is known of the instance, and the limits of senders.

        `strict`: outputs that the configuration does not have are errors.
        """
        self._name = message.instance_name
        self._model_name = message.args["model_name"]
        self._declared_outputs = message.outputs
        self._strict = strict
        self.max_outstanding_responses = max(1, message.max_outstanding_responses)
        self.send_timeout = message.send_timeout

    def check_dropped_outputs(
        self, outputs: Sequence[pb_utils.Tensor], requested: Sequence[str], none_left: bool
    ) -> Optional[WireResponse]:
        """Logs once that outputs were dropped which the model has returned in vain.

        Returns the error that replaces the response if outputs are not in the configuration, and
        that is an error. `none_left`: no output of the response was requested.
        """
        dropped = [tensor for tensor in outputs if tensor._name not in requested]  # no states
        undeclared = describe_undeclared(self._model_name, dropped, self._declared_outputs)
        if undeclared is not None and self._strict:
            return error_response(undeclared)
        names = [tensor._name for tensor in outputs]
        if not (undeclared or none_left) or self._warned_of.issuperset(names):
            return None
        self._warned_of.update(names)
        if undeclared is not None:
            text = limit_text(f"{undeclared}; the output is not sent")
            self.channel.send([ModelWarning(text)])
            return None
        text = (
            f"a response has no output that was asked for: the model returned {_quote(names)}, but"
            f" the configuration or the request names {_quote(requested)}"
        )
        self.channel.send([LogLine(_WARNING, "responders.py", 0, limit_text(text))])
        return None

    def begin_batch(self, batch: int, responders: "Sequence[StubResponder]") -> None:
        """Registers the responders of a batch; applies cancellations that arrived before it."""
        with self._batch_lock:
            self._current_responders = responders
            self._last_batch = batch
            if self._cancelled_early:
                for responder in responders:
                    if (batch, responder.index) in self._cancelled_early:
                        responder.cancel()
                self._cancelled_early = {key for key in self._cancelled_early if key[0] > batch}

    def end_batch(self, responders: "Sequence[StubResponder]") -> List[int]:
        """Unregisters a batch; returns the indexes of requests without a final response."""
        late: List[int] = []
        for responder in responders:
            if not responder.closed:
                self._late_responders[responder.batch, responder.index] = responder
                late.append(responder.index)
        if responders is self._current_responders:
            self._current_responders = ()
        return late

    def cancel_request(self, batch: int, index: int) -> None:
        """Cancels a request, also one whose batch has not begun."""
        with self._batch_lock:
            if batch > self._last_batch:
                self._cancelled_early.add((batch, index))
                return
        responder = self._find_responder(batch, index)
        if responder is not None:
            responder.cancel()

    def acknowledge_responses(self, batch: int, index: int, count: int) -> None:
        """Notes that the client has received responses to a request."""
        responder = self._find_responder(batch, index)
        if responder is not None:
            responder.acknowledge_responses(count)

    def _find_responder(self, batch: int, index: int) -> "Optional[StubResponder]":
        for responder in self._current_responders:
            if responder.batch == batch and responder.index == index:
                return responder
        return self._late_responders.get((batch, index))

    def on_responder_dropped(self, batch: int, index: int, held: Optional[_HeldResponse]) -> None:
        """Queues the response to a deleted request. Called by finalisers, so it never waits."""
        self._dropped.append((batch, index, held))
        self._wake()

    def take_responses_to_dropped_requests(self, exported: List[Block]) -> List[ToHost]:
        """Returns the responses to requests that were dropped since the last call.

        Adds the blocks of the responses to `exported`.
        """
        messages: List[ToHost] = []
        while self._dropped:
            batch, index, held = self._dropped.popleft()
            messages.append(
                Response(
                    batch,
                    index,
                    self.export_held_response(held, exported) or self.no_response_error(),
                )
            )
        return messages

    def export_held_response(
        self, held: Optional[_HeldResponse], exported: List[Block]
    ) -> Optional[WireResponse]:
        """Exports the blocks of a held response, if there is one, and returns the response."""
        if held is None:
            return None
        response, blocks = held
        self.memory.export_blocks(blocks)
        exported.extend(blocks)
        return response

    def no_response_error(self) -> WireResponse:
        """Returns the error for a request that the model dropped without a response."""
        return error_response(
            f"Model instance '{self._name}' returned no response for this request and let go of"
            " it: `execute` must return one InferenceResponse for each request, or its response"
            " sender must send the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL"
        )


class _ResponseCredit:
    """Counts the responses sent to one client, and those that it has acknowledged.

    The thread with the responder's lock changes the counts of sent responses; the service thread
    changes the others.
    """

    __slots__ = ("changed", "sent", "sent_bytes", "sizes", "acknowledged", "acknowledged_bytes")

    def __init__(self) -> None:
        self.sizes: Deque[int] = deque()
        self.sent = self.sent_bytes = 0
        self.acknowledged = self.acknowledged_bytes = 0
        self.changed = threading.Condition()

    def add_sent(self, size: int) -> None:
        self.sizes.append(size)
        self.sent_bytes += size
        self.sent += 1

    def remove_last_sent(self) -> None:
        """Reverts `add_sent`: the response was not sent."""
        self.sent_bytes -= self.sizes.pop()
        self.sent -= 1

    def acknowledge(self, count: int) -> None:
        for _ in range(min(count, len(self.sizes))):
            self.acknowledged_bytes += self.sizes.popleft()
        self.acknowledged += count
        self.wake_senders()

    def wake_senders(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def is_exhausted(self, responses: int, size: int) -> bool:
        outstanding = self.sent - self.acknowledged
        return outstanding > 0 and (
            outstanding >= responses or self.sent_bytes - self.acknowledged_bytes >= size
        )


class StubResponder(Responder):
    """Sends the responses to one request of a batch."""

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
        """Creates the responder of one request.

        `requested_outputs` are the names of the outputs to send, `output_placement` the client's
        memory for some of them. `max_outstanding_responses` limits the unacknowledged responses;
        0 means the limit of the instance.
        """
        super().__init__(decoupled)
        self.batch = batch
        self.index = index
        self.cancelled = False
        self.requested_outputs = requested_outputs
        self.output_placement = output_placement
        self.max_outstanding_responses = max_outstanding_responses
        self._registry = registry
        self._held_response: Optional[_HeldResponse] = None  # sent without the final flag
        self._credit: Optional[_ResponseCredit] = None  # set by the first decoupled response

    def __del__(self) -> None:
        if not self.closed:
            self._registry.on_responder_dropped(self.batch, self.index, self._held_response)

    def to_wire(self, response: pb_utils.InferenceResponse, exported: List[Block]) -> WireResponse:
        """Converts a response for the wire; `exported` as in `tensor_to_wire`."""
        before = len(exported)
        wire = response_to_wire(
            response, self.requested_outputs, self._registry.memory, exported, self.output_placement
        )
        outputs = response._output_tensors
        if len(wire.outputs) == len(outputs) or wire.error is not None:
            return wire
        error = self._registry.check_dropped_outputs(
            outputs, self.requested_outputs, not wire.outputs
        )
        if error is not None:
            del exported[before:]
        return error or wire

    def take_held_response(self, exported: List[Block]) -> Optional[WireResponse]:
        """Returns the response that was sent without the final flag, if any, and removes it."""
        held, self._held_response = self._held_response, None
        return self._registry.export_held_response(held, exported)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self.cancelled

    def cancel(self) -> None:
        """Marks the request cancelled and wakes the senders that wait."""
        self.cancelled = True
        self._wake_senders()

    def _wake_senders(self) -> None:
        if self._credit is not None:
            self._credit.wake_senders()

    def acknowledge_responses(self, count: int) -> None:
        """Adds acknowledged responses; called on the service thread only."""
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
        with credit.changed:
            while not (self.cancelled or self.closed) and credit.is_exhausted(*limits):
                if not credit.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise pb_utils.TritonModelException(
                        f"Unable to send response. For {registry.send_timeout:g} seconds the caller"
                        f" has taken none of {credit.sent - credit.acknowledged} earlier responses,"
                        f" which are {credit.sent_bytes - credit.acknowledged_bytes} bytes."
                    )

    def _send_response(self, response: Optional[pb_utils.InferenceResponse], final: bool) -> None:
        exported: List[Block] = []
        wire: Optional[WireResponse] = None
        if response is not None:
            wire = self.to_wire(response, exported)
        if not self.decoupled:
            # The client gets a single, final message.
            if not final:
                assert wire is not None
                self._held_response = wire, exported
                return
            if wire is None and self._held_response is not None:
                wire, exported = self._held_response
                self._held_response = None
            # After this response the client may change its shared memory.
            self._registry.memory.views.detach_from_client_regions()
        self._registry.memory.export_blocks(exported)
        if wire is not None and not final:
            if self._credit is None:
                self._credit = _ResponseCredit()
            self._credit.add_sent(sum(_wire_nbytes(output) for output in wire.outputs))
        try:
            self._registry.channel.send([Response(self.batch, self.index, wire, final)])
        except (TypeError, ValueError, OverflowError) as error:  # the response cannot be encoded
            self._registry.memory.cancel_export(exported)
            if self._credit is not None and wire is not None and not final:
                self._credit.remove_last_sent()
            raise pb_utils.TritonModelException(
                f"Unable to send response. It cannot be put into a message: {error!r}"
            ) from error


def _wire_nbytes(output: WireTensor) -> int:
    return len(output.data) if output.data is not None else output.size
