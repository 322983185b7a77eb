"""Answers that leave one by one: the exchanges of a stub, and what senders do with them."""

import threading
import time
from collections import deque
from typing import Callable, Deque, List, Mapping, Optional, Sequence, Set, Tuple
from weakref import WeakValueDictionary

import pb_utils
from pb_utils._sender import Exchange
from stub.channel import Channel
from stub.convert import failed, response_to
from stub.memory import Memory
from stub.wire.arena import Block
from stub.wire.messages import (
    Initialize,
    Respond,
    ToHost,
)
from stub.wire.payload import (
    Slot,
    WireResponse,
    WireTensor,
)

_MOST_BYTES_UNDER_WAY = 4 << 20
"""Responses of one request that its caller has not taken yet: a sender waits beyond that."""

_ON_A_LOOP = 16
"""So many times more for a sender on an event loop: its wait holds up every other coroutine."""


_Held = Tuple[WireResponse, List[Block]]
"""A response, and what it refers to."""


class Replies:
    """Every exchange that may still be answered; any thread may call.

    `wake` has `dropped` called soon, by a thread that may send.
    """

    def __init__(self, channel: Channel, memory: Memory, wake: Callable[[], None]) -> None:
        self.channel = channel
        self.memory = memory
        self.send_seconds = 60.0
        self.window = 128  # responses of one request under way
        self.loop_thread: Optional[int] = None  # where waiting is worst
        self._name = ""
        self._wake = wake
        self._current: Sequence[StubExchange] = ()
        self._late: WeakValueDictionary[Tuple[int, int], StubExchange] = WeakValueDictionary()
        self._dropped: Deque[Tuple[int, int, Optional[_Held]]] = deque()
        self._begun = 0
        self._beginning = threading.Lock()
        self._early: Set[Tuple[int, int]] = set()  # cancelled before their batch has begun

    def become(self, message: Initialize) -> None:
        """The instance is known, and how long a sender may wait."""
        self._name = message.instance_name
        self.window = max(1, message.window)
        self.send_seconds = message.send_seconds

    def on_loop(self, thread: int) -> None:
        """That thread runs an event loop."""
        self.loop_thread = thread

    def begin(self, batch: int, exchanges: "Sequence[StubExchange]") -> None:
        """These are answered from now on; those cancelled already are told so."""
        with self._beginning:
            self._current = exchanges
            self._begun = batch
            if self._early:
                for exchange in exchanges:
                    if (batch, exchange.index) in self._early:
                        exchange.cancel()
                self._early = {key for key in self._early if key[0] > batch}

    def end(self, exchanges: "Sequence[StubExchange]") -> List[int]:
        """The main thread has left the batch; the indexes that are still to be answered."""
        late: List[int] = []
        for exchange in exchanges:
            if not exchange.closed:
                self._late[exchange.batch, exchange.index] = exchange
                late.append(exchange.index)
        if exchanges is self._current:
            self._current = ()
        return late

    def cancel(self, batch: int, index: int) -> None:
        """The caller of that request has gone."""
        with self._beginning:
            if batch > self._begun:
                self._early.add((batch, index))
                return
        exchange = self._find(batch, index)
        if exchange is not None:
            exchange.cancel()

    def taken(self, batch: int, index: int, count: int) -> None:
        """The caller of that request has taken responses."""
        exchange = self._find(batch, index)
        if exchange is not None:
            exchange.taken(count)

    def _find(self, batch: int, index: int) -> "Optional[StubExchange]":
        for exchange in self._current:
            if exchange.batch == batch and exchange.index == index:
                return exchange
        return self._late.get((batch, index))

    def drop(self, batch: int, index: int, held: Optional[_Held]) -> None:
        """Nobody can answer that request any more. Called by finalisers: waits for nothing."""
        self._dropped.append((batch, index, held))
        self._wake()

    def dropped(self, placed: List[Block]) -> List[ToHost]:
        """The answers to requests that were dropped since the last call; `placed` as usual."""
        answers: List[ToHost] = []
        while self._dropped:
            batch, index, held = self._dropped.popleft()
            answers.append(Respond(batch, index, self.tell(held, placed) or self.unanswered()))
        return answers

    def tell(self, held: Optional[_Held], placed: List[Block]) -> Optional[WireResponse]:
        """A response that is about to be sent after all, if there is one."""
        if held is None:
            return None
        response, blocks = held
        self.memory.tell(blocks)
        placed.extend(blocks)
        return response

    def unanswered(self) -> WireResponse:
        """The answer to a request for which the model has none."""
        return failed(
            f"Model instance '{self._name}' returned no response for this request and let go of"
            " it: `execute` must return one InferenceResponse for each request, or its response"
            " sender must send the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL"
        )


class _Flow:
    """What was sent to one caller, and what it has taken of that.

    Each figure is changed by one thread only: those of what was sent by whoever has the exchange's
    lock, those of what was taken by the service thread.
    """

    __slots__ = ("room", "sent", "sent_bytes", "sizes", "taken", "taken_bytes")

    def __init__(self) -> None:
        self.sizes: Deque[int] = deque()
        self.sent = self.sent_bytes = 0
        self.taken = self.taken_bytes = 0
        self.room = threading.Event()  # something has changed for the better

    def send(self, size: int) -> None:
        self.sizes.append(size)
        self.sent_bytes += size
        self.sent += 1

    def unsend(self) -> None:
        """The last one was not sent after all."""
        self.sent_bytes -= self.sizes.pop()
        self.sent -= 1

    def take(self, count: int) -> None:
        for _ in range(min(count, len(self.sizes))):
            self.taken_bytes += self.sizes.popleft()
        self.taken += count
        self.room.set()

    def is_full(self, responses: int, size: int) -> bool:
        waiting = self.sent - self.taken
        return waiting > 0 and (waiting >= responses or self.sent_bytes - self.taken_bytes >= size)


class StubExchange(Exchange):
    """One request of a batch."""

    __slots__ = (
        "_flow",
        "_held",
        "_replies",
        "batch",
        "cancelled",
        "index",
        "outputs",
        "slots",
        "window",
    )

    def __init__(
        self,
        replies: Replies,
        batch: int,
        index: int,
        decoupled: bool,
        outputs: Sequence[str],
        slots: Optional[Mapping[str, Slot]] = None,
        window: int = 0,
    ) -> None:
        """`outputs` are those that the caller wants, `slots` where it wants some of them.

        `window` is how many responses may be under way to it, 0 for as many as to any other.
        """
        super().__init__(decoupled)
        self.batch = batch
        self.index = index
        self.cancelled = False
        self.outputs = outputs
        self.slots = slots
        self.window = window
        self._replies = replies
        self._held: Optional[_Held] = None  # sent, but not as the last one
        self._flow: Optional[_Flow] = None  # of a decoupled request that has got a response

    def __del__(self) -> None:
        if not self.closed:
            self._replies.drop(self.batch, self.index, self._held)

    def wire(self, response: pb_utils.InferenceResponse, placed: List[Block]) -> WireResponse:
        """A response as the caller is to get it; `placed` as in `tensor_to`."""
        return response_to(response, self.outputs, self._replies.memory, placed, self.slots)

    def sent(self, placed: List[Block]) -> Optional[WireResponse]:
        """What an ordinary model has sent without the flag that ends the request."""
        held, self._held = self._held, None
        return self._replies.tell(held, placed)

    def is_cancelled(self) -> bool:
        """Whether the caller has gone."""
        return self.cancelled

    def cancel(self) -> None:
        """The caller has gone: from now on nothing waits for it."""
        self.cancelled = True
        if self._flow is not None:
            self._flow.room.set()

    def taken(self, count: int) -> None:
        """The caller has taken so many responses; the service thread only."""
        if self._flow is not None:
            self._flow.take(count)

    def _make_room(self) -> None:
        flow = self._flow
        if flow is None:
            return
        replies = self._replies
        factor = _ON_A_LOOP if threading.get_ident() == replies.loop_thread else 1
        window = self.window or replies.window * factor
        most = window, _MOST_BYTES_UNDER_WAY * factor
        if not flow.is_full(*most):
            return
        deadline = time.monotonic() + replies.send_seconds
        while True:
            flow.room.clear()
            if self.cancelled or self.closed or not flow.is_full(*most):
                return
            if not flow.room.wait(max(0.0, deadline - time.monotonic())):
                raise pb_utils.TritonModelException(
                    f"Unable to send response. For {replies.send_seconds:g} seconds the caller has"
                    f" taken none of {flow.sent - flow.taken} earlier responses, which are"
                    f" {flow.sent_bytes - flow.taken_bytes} bytes."
                )

    def _deliver(self, response: Optional[pb_utils.InferenceResponse], final: bool) -> None:
        placed: List[Block] = []
        wire: Optional[WireResponse] = None
        if response is not None:
            wire = self.wire(response, placed)
        if not self.decoupled:
            # The caller gets one message, and it is the last one.
            if not final:
                assert wire is not None
                self._held = wire, placed
                return
            if wire is None and self._held is not None:
                wire, placed = self._held
                self._held = None
            # Its client may change its memory now, and `execute` goes on.
            self._replies.memory.snapshots.part_from_regions()
        self._replies.memory.tell(placed)
        if wire is not None and not final:
            if self._flow is None:
                self._flow = _Flow()
            self._flow.send(sum(_size(output) for output in wire.outputs))
        try:
            self._replies.channel.send([Respond(self.batch, self.index, wire, final)])
        except (TypeError, ValueError, OverflowError) as error:  # it cannot be put into a message
            self._replies.memory.untell(placed)
            if self._flow is not None and wire is not None and not final:
                self._flow.unsend()
            raise pb_utils.TritonModelException(
                f"Unable to send response. It cannot be put into a message: {error!r}"
            ) from error


def _size(output: WireTensor) -> int:
    return len(output.data) if output.data is not None else output.size
