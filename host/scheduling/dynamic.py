"""Calls that fit together run together (configuration spec 4.2 to 4.7)."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable

from host.errors import HostError, invalid_argument, unavailable
from host.inference.request import Call, FailureReason
from host.scheduling.clock import Clock, LoopClock, Timer
from host.scheduling.ordering import OrderedCall, ResponseOrdering
from host.scheduling.policy import QueuePolicies
from host.scheduling.queue import InstanceQueue, start_batch
from host.scheduling.scheduler import InstanceSlot
from host.scheduling.waiting import NEVER, FifoQueue, PolicyQueue

CanShareBatch = Callable[[Call, Call], bool]
"""Whether two calls may share a batch (configuration spec 4.7)."""

HOLD = "TRITONSERVER_DELAY_SCHEDULER"
"""Environment variable: how many calls have to wait before the first batch is made."""


class CloseReason(enum.Enum):
    """Why a batch was made of these calls and no more."""

    SIZE = "size"  # it has the size that is wanted
    MISFIT = "misfit"  # the next call does not fit in
    DELAY = "delay"  # its oldest call had waited long enough
    NO_DELAY = "no_delay"  # nobody else was there, and nobody is to wait


class DynamicScheduler(InstanceQueue):
    """A batch is made when a instance is free for it, of those who wait first in the queue.

    It gets the largest preferred size that can be reached (`preferred`; none means the largest
    there is). One that reaches none waits for company until its oldest call is `delay` seconds
    old; then it takes all that the largest size has room for. Who cannot join in ends the
    waiting. Without a delay, those who were in the batch before, and have just been answered, get
    a moment to ask again if fewer than they were wait. With `policies`, calls are served by
    priority, refused with UNAVAILABLE when too many wait, and dealt with when they have waited too
    long, whether or not a instance is there. With `keep_order`, calls must be `OrderedCall`s, and
    respond in the order in which they came. Nothing starts before `hold` calls have waited at the
    same time once.
    """

    def __init__(
        self,
        max_batch_size: int,
        delay: float,
        compatible: CanShareBatch,
        *,
        preferred: Iterable[int] = (),
        policies: QueuePolicies | None = None,
        keep_order: bool = False,
        hold: int = 0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            PolicyQueue(policies)
            if policies is not None and policies.need_policy_queue
            else FifoQueue()
        )
        self._largest = max(1, max_batch_size)
        self._preferred = frozenset(preferred) or frozenset([self._largest])
        self._enough = max(self._preferred)
        self._delay = round(delay * 1e9)
        self._timed = isinstance(self._queue, PolicyQueue)
        self._compatible = compatible
        self._order = ResponseOrdering() if keep_order else None
        self._hold = hold
        self._clock = LoopClock() if clock is None else clock
        self._timer: Timer | None = None
        self._timer_at = 0
        self._last = 0  # calls of the batch that was made last
        self._gathering = False  # a batch is due in a moment
        self._at_once = hold <= 0 and self._delay <= 0
        self.closed = dict.fromkeys(CloseReason, 0)
        """How many batches were made, by why they were."""

    def submit(self, call: Call) -> None:
        """Queue the call; it starts when a instance is free and its batch is due.

        Raises HostError if too many wait already.
        """
        # Without a limit to keep to, with nothing to wait for, and nobody to go with.
        if self._at_once and not self._timed and self._free and not self._queue:
            instance = self.gate.acquire_instance(self._free)
            if instance is not None:
                if self._order is not None:
                    self._enter_ordering(call)
                size = call.request.batch_size or 1
                wanted = size >= self._enough or size in self._preferred
                self.closed[CloseReason.SIZE if wanted else CloseReason.NO_DELAY] += 1
                start_batch(instance, [call])
                return
        self._enqueue(call)
        if self._order is not None:
            self._enter_ordering(call)
        if self._hold or (self._free and not (self._gathering and len(self._queue) < self._enough)):
            self.dispatch()
        if self._timed:
            self._set_timer(self._queue.next_timeout)

    def instance_ready(self, instance: InstanceSlot) -> None:
        """Give the instance a batch if one is due."""
        self._add_instance(instance)
        self._free.append(instance)
        if not self._queue:
            return
        if self._at_once and len(self._queue) < min(self._last, self._enough):
            if not self._gathering:
                self._gathering = True
                self._clock.call_after_reading(self._requests_gathered)
        else:
            self.dispatch()

    def _requests_gathered(self) -> None:
        self._gathering = False
        self.dispatch()

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().fail_queued(error)

    def dispatch(self) -> None:
        """Start the batches that are due, as long as there are instances for them."""
        if self._hold and len(self._queue) < self._hold:
            return
        if self._hold:
            self._hold = 0
            self._at_once = self._delay <= 0
        now = 0  # without a delay or timeouts it is all the same
        if self._delay or self._timed:
            now = self._clock.now()
            if self._queue.next_timeout <= now:
                self._expire(now)
        while self._free and self._queue:
            batch, due, why = self._next_batch(now)
            if due > now:
                self._set_timer(due)
                return
            instance = self.gate.acquire_instance(self._free)
            if instance is None:
                return
            self.closed[why] += 1
            self._last = len(batch)
            for call in batch:
                self._withdraw(call)
            start_batch(instance, batch)

    def _next_batch(self, now: int) -> tuple[list[Call], int, CloseReason]:
        """The calls that go together as things are, when they should go at the latest, and why."""
        batch: list[Call] = []
        size = preferred = 0
        oldest = now
        for call in self._queue:
            elements = call.request.batch_size or 1
            grown = size + elements
            if batch:
                if grown > self._enough and not preferred:
                    preferred = len(batch)
                if grown > self._largest or not self._compatible(batch[0], call):
                    closed = True
                    break
            batch.append(call)
            size = grown
            if call.queued_ns < oldest:
                oldest = call.queued_ns
            if size in self._preferred:
                preferred = len(batch)
        else:
            closed = False
        due = oldest + self._delay
        if preferred and (due > now or not self._delay):
            return batch[:preferred], now, CloseReason.SIZE
        if size >= self._enough:
            return batch, now, CloseReason.SIZE
        if closed:
            return batch, now, CloseReason.MISFIT
        return batch, due, CloseReason.DELAY if self._delay else CloseReason.NO_DELAY

    def _expire(self, now: int) -> None:
        for call in self._queue.expire_calls(now):
            call.failure_reason = FailureReason.REJECTED
            self.refuse(call, unavailable("Request timeout expired"))
        if not self._queue:
            self.gate.queue_empty()

    def _set_timer(self, time: int) -> None:
        """Look again then. One timer is enough: it may come too early, and is then set again."""
        if time >= NEVER:
            return
        if self._timer is not None:
            if self._timer_at <= time:
                return
            self._timer.cancel()
        self._timer_at = time
        self._timer = self._clock.call_later(max(1, time - self._clock.now()), self._timer_expired)

    def _timer_expired(self) -> None:
        self._timer = None
        self._expire(self._clock.now())
        self.dispatch()
        self._set_timer(self._queue.next_timeout)

    def reserve(self, call: Call) -> None:
        """Give the call its place in the order of responses, if there is one."""
        if self._order is not None:
            self._enter_ordering(call)

    def _enter_ordering(self, call: Call) -> None:
        assert isinstance(call, OrderedCall) and self._order is not None
        if call.order is None:
            self._order.add_call(call)

    def refuse(self, call: Call, error: HostError) -> None:
        """Answer a call that will not run; it holds back no other response."""
        if isinstance(call, OrderedCall):
            call.refuse(error)
        else:
            call.fail(error)


def hold_from_environment() -> int:
    """The value of `TRITONSERVER_DELAY_SCHEDULER`, 0 if it is not set. Raises HostError."""
    text = os.environ.get(HOLD, "0")
    if not text.isdecimal():
        raise invalid_argument(
            f"environment variable {HOLD} must be a whole number of requests, got '{text}'"
        )
    return int(text)
