"""What schedulers have in common: their interface, clocks, gates, queues and queue policies."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from host.errors import HostError
from host.inference.call import Call, CallHolder
from host.scheduling.rate_limiter import Permit


class Timer(Protocol):
    """A timer that was started."""

    def cancel(self) -> None:
        """Cancels the timer."""


class Clock(Protocol):
    """A clock in nanoseconds of CLOCK_MONOTONIC, like `Call.queued_ns`."""

    def now(self) -> int:
        """The current time."""

    def call_later(self, delay: int, callback: Callable[[], None]) -> Timer:
        """Calls back after about `delay`; it may be a little early, so check the time again."""

    def call_after_reading(self, callback: Callable[[], None]) -> None:
        """Calls back once what has arrived was read and what was written has left."""


class LoopClock:
    """The clock of the running event loop."""

    def now(self) -> int:
        """The current time."""
        return time.monotonic_ns()

    def call_later(self, delay: int, callback: Callable[[], None]) -> Timer:
        """Calls back from the event loop, whose thread must be the caller."""
        return asyncio.get_running_loop().call_later(delay / 1e9, callback)

    def call_after_reading(self, callback: Callable[[], None]) -> None:
        """Calls back in the next turn but one, as the loop reads between two turns."""
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, callback)


class CoalescingTimer:
    """Calls `ring` at the scheduled time; the callee checks the clock and schedules again.

    Times are nanoseconds of the clock.
    """

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._timer: Timer | None = None
        self._at = 0

    def schedule(self, at: int) -> None:
        """Schedules the timer, unless an earlier time is scheduled."""
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        self._timer = self._clock.call_later(max(1, at - self._clock.now()), self._expired)

    def cancel(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        self._ring()


class InstanceSlot(CallHolder, ABC):
    """Runs batches, one at a time."""

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> None:
        """Runs a batch. The scheduler's `instance_ready` is called when the next one may start.

        That may be before the calls of this one have ended.
        """

    def accepts_prefetch(self, call: Call, prefetched: int) -> bool:
        """Whether it takes this call while it runs another one and has `prefetched` more.

        By default it takes none, and `run_prefetched` is not called.
        """
        return False

    def accepts_reclaimable(self, call: Call, prefetched: int, finds_core: bool) -> bool:
        """Whether it takes this call as prefetch although the model has other instances.

        `finds_core`: whether there is a core for one more of them. Only a fast instance accepts;
        by default none does.
        """
        return False

    def accepts_next(self, call: Call) -> bool:
        """Whether it takes this call as its next one, as all of several instances are busy.

        By default it does not.
        """
        return False

    def run_prefetched(
        self, call: Call, on_returned: Callable[[InstanceSlot, Call], None] | None
    ) -> None:
        """Runs a call as soon as it would be free; `instance_ready` is called for each.

        With `on_returned`, the call may be reclaimed until it starts. It is called if the instance
        does not run the call, as the batch before it waits for another model.
        """
        raise NotImplementedError

    def reclaim_prefetched(self, most: int) -> Sequence[Call]:
        """Returns the newest calls that the instance has not taken, and will not run; oldest first.

        `most`: how many of them at most. The others will start, or have started.
        """
        return ()

    def report_expired_sequences(self, correlation_ids: Sequence[int | str]) -> None:
        """Tells the model that sequences have ended without an END, before its next batch.

        By default does nothing.
        """

    @abstractmethod
    def drain_prefetched(self) -> Sequence[Call]:
        """Returns, once, the prefetched calls that it had not started when it died."""


class Scheduler(CallHolder, ABC):
    """Takes calls, and runs them in batches on free instances; each call exactly once."""

    instances: list[InstanceSlot]
    """Every instance that is alive, free or busy."""

    may_recover: Callable[[], bool]
    """Whether an instance that was removed is being replaced; set by the model."""

    keeps_sequences = False
    """Whether calls belong to sequences, which end after their calls."""

    on_sequences_ended: Callable[[], None]
    """Called when the last sequence has ended, by a scheduler that keeps sequences."""

    @property
    @abstractmethod
    def queued(self) -> int:
        """Number of calls that have not started."""

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence has started and not ended, even if it is idle."""
        return False

    def count_unfinished(self, calls: Collection[Call]) -> int:
        """The number of these calls in progress, or of sequences that have not ended."""
        return len(calls)

    def retire_instance(self, instance: InstanceSlot, then: Callable[[], None]) -> None:
        """Gives the instance no new sequences; calls `then` once its last one has ended."""
        then()

    @abstractmethod
    def limit_executions(self, permit_of: Callable[[InstanceSlot], Permit]) -> None:
        """Runs a batch only once the rate limiter has granted the instance its resources."""

    def reserve(self, call: Call) -> None:
        """Called when a call arrives that may be answered from the cache or be submitted later.

        If responses have an order, it has its place in that from now on.
        """

    @abstractmethod
    def submit(self, call: Call) -> None:
        """Queues a call or starts it at once. Raises HostError if the queue is full."""

    @abstractmethod
    def refuse(self, call: Call, error: HostError) -> None:
        """Fails a call that was reserved, or taken from the queue, and will not run."""

    @abstractmethod
    def instance_ready(self, instance: InstanceSlot) -> None:
        """Called when the instance can take a batch; an unknown instance is added."""

    @abstractmethod
    def instance_removed(self, instance: InstanceSlot) -> None:
        """Called when the instance takes no batches any more, until it is ready again."""

    @abstractmethod
    def fail_queued(self, error: HostError) -> None:
        """Fails every call that has not started."""
