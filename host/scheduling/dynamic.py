"""The dynamic batcher: calls that fit together run as one batch.

Source: docs/reference/scheduling.md, "Terms" to "Which requests may share a
batch".
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable

from host.errors import HostError, invalid_argument, unavailable
from host.inference.call import Call, FailureReason
from host.scheduling.ordering import OrderedCall, ResponseOrdering
from host.scheduling.queue import (
    NEVER,
    FifoQueue,
    InstanceQueue,
    PolicyQueue,
    QueuePolicies,
    start_batch,
)
from host.scheduling.scheduler import Clock, CoalescingTimer, InstanceSlot, LoopClock

CanShareBatch = Callable[[Call, Call], bool]
"""Whether two calls may share a batch.

Source: docs/reference/scheduling.md, "Which requests may share a batch".
"""

_LARGEST_GATHERED = 16  # calls; a larger batch saves little by taking its first call in, too

HOLD = "TRITONSERVER_DELAY_SCHEDULER"
"""Environment variable: number of calls that must be queued before the first batch."""


class CloseReason(enum.Enum):
    """Why a batch was closed."""

    SIZE = "size"  # it has the preferred or maximum size
    MISFIT = "misfit"  # the next call does not fit
    DELAY = "delay"  # its oldest call has waited for the maximum queue delay
    NO_DELAY = "no_delay"  # no other call is queued, and there is no queue delay

    __hash__ = object.__hash__  # in C


class DynamicScheduler(InstanceQueue):
    """Forms a batch from the front of the queue when an instance is free.

    The batch gets the largest preferred size that can be reached (`preferred`; without one, the
    maximum size). If none is reached, it waits until its oldest call is `delay` seconds old, and
    then takes as many calls as fit. A call that cannot join ends the wait. Without a delay, if
    fewer calls are queued than the last batch had, the callers that were just answered get a moment
    to send again; after a small batch of the only instance, also if no other call is queued.

    `policies`: priorities, limits on the queue (UNAVAILABLE beyond) and timeouts, which apply with
    and without free instances. `keep_order`: calls are `OrderedCall`s and respond in their order of
    arrival. `hold`: nothing starts before this number of calls were queued at once.
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
        self._timer = CoalescingTimer(self._clock, self._on_timer)
        self._last = 0  # number of calls in the last batch
        self._gathering = False  # a batch will be formed in a moment
        self._at_once = hold <= 0 and self._delay <= 0
        self.closed = dict.fromkeys(CloseReason, 0)
        """Number of batches by close reason."""

    def submit(self, call: Call) -> None:
        """Queues the call; it starts when an instance is free and its batch is due.

        Raises HostError if the queue is full.
        """
        # No limit applies, and no other call is queued.
        at_once = self._at_once and not self._timed and self._free and not self._queue
        if at_once and 1 < self._last <= _LARGEST_GATHERED and len(self.instances) == 1:
            self._gather()
        elif at_once:
            instance = self.gate.acquire_instance(self._free)
            if instance is not None:
                if self._order is not None:
                    self._enter_ordering(call)
                size = call.request.batch_size or 1
                wanted = size >= self._enough or size in self._preferred
                self.closed[CloseReason.SIZE if wanted else CloseReason.NO_DELAY] += 1
                start_batch(instance, [call])
                return
        self._queue.add(call)  # which raises an error if the call has no room
        call.holder = self
        if self._order is not None:
            self._enter_ordering(call)
        if self._hold or (self._free and not (self._gathering and len(self._queue) < self._enough)):
            self.dispatch()
        if self._timed:
            self._set_timer(self._queue.next_timeout)

    def instance_ready(self, instance: InstanceSlot) -> None:
        """Gives the instance a batch if one is due."""
        if instance not in self._members:
            self._add_instance(instance)
        self._free.append(instance)
        if not self._queue:
            return
        if self._at_once and len(self._queue) < min(self._last, self._enough):
            self._gather()
        else:
            self.dispatch()

    def _gather(self) -> None:
        if not self._gathering:
            self._gathering = True
            self._clock.call_after_reading(self._requests_gathered)

    def _requests_gathered(self) -> None:
        self._gathering = False
        self.dispatch()

    def fail_queued(self, error: HostError) -> None:
        """Fails every call that has not started."""
        self._timer.cancel()
        super().fail_queued(error)

    def dispatch(self) -> None:
        """Starts the batches that are due while there are free instances."""
        if self._hold and len(self._queue) < self._hold:
            return
        if self._hold:
            self._hold = 0
            self._at_once = self._delay <= 0
        now = 0  # without a delay or timeouts the time does not matter
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
        """The calls of the next batch, the time when it has to start, and the close reason."""
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
        if time < NEVER:
            self._timer.schedule(time)

    def _on_timer(self) -> None:
        self._expire(self._clock.now())
        self.dispatch()
        self._set_timer(self._queue.next_timeout)

    def reserve(self, call: Call) -> None:
        """Gives the call its place in the order of responses, if there is one."""
        if self._order is not None:
            self._enter_ordering(call)

    def _enter_ordering(self, call: Call) -> None:
        assert isinstance(call, OrderedCall) and self._order is not None
        if call.order is None:
            self._order.add_call(call)

    def refuse(self, call: Call, error: HostError) -> None:
        """Fails a call that will not run; other responses do not wait for it."""
        if isinstance(call, OrderedCall):
            call.refuse(error)
        else:
            call.fail(error)


def hold_from_environment(variable: str = HOLD) -> int:
    """The number of requests in an environment variable, 0 if it is not set. Raises HostError."""
    text = os.environ.get(variable, "0")
    if not text.isdecimal():
        raise invalid_argument(
            f"environment variable {variable} must be a whole number of requests, got '{text}'"
        )
    return int(text)
