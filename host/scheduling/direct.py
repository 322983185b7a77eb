"""First come, first served: each call is a batch of its own.

Source: docs/reference/configuration_and_scheduling.md, 4.1.
"""

from __future__ import annotations

import math
from collections import deque
from operator import attrgetter

from host.errors import HostError
from host.inference.call import Call
from host.scheduling.clock import Clock, LoopClock, Timer
from host.scheduling.queue import InstanceQueue, start_batch
from host.scheduling.scheduler import InstanceSlot
from host.scheduling.waiting import FifoQueue

_RECLAIM_INTERVAL_NS = 2_000_000
"""Prefetched calls are reclaimed from an instance that has started none of them for so long."""

_MAX_CHECKS = 5
"""After so many of these intervals they are reclaimed even if no instance is idle."""


class DirectScheduler(InstanceQueue):
    """The scheduler of a model whose configuration names none.

    An instance may get the next calls (prefetch) while it still runs one. They count as queued
    until they have started. The only instance of a model gets as many as it accepts, but none while
    another instance is being replaced, which may be free earlier.

    Of several instances, only the one that was given work last gets calls in advance, and only if
    it is so fast that they start earlier than on an instance that has to wake up. While at least as
    many calls are queued as there are instances, each instance gets the call after its next one. If
    an instance becomes slow, these calls are reclaimed for others
    (docs/explanation/decisions/0038). `cpus`: the number that the server and its instances may use.
    """

    def __init__(self, clock: Clock | None = None, cpus: float = math.inf) -> None:
        self._waiting = FifoQueue()
        super().__init__(self._waiting)
        self._clock = LoopClock() if clock is None else clock
        self._useful = max(1, cpus - 1)  # busy instances, besides which no other finds a core
        self._recent: InstanceSlot | None = None  # the one that was given work last, if it is busy
        self._ahead: dict[InstanceSlot, deque[Call]] = {}  # the prefetched calls, where they are
        self._timer: Timer | None = None
        # The first of `_ahead`, and the number of checks since it is the first.
        self._next_calls: dict[InstanceSlot, tuple[Call, int]] = {}

    def reserve(self, call: Call) -> None:
        """Does nothing, as responses have no order."""

    def submit(self, call: Call) -> None:
        """Starts the call if an instance is free, otherwise queues it."""
        if self._queue:
            self._enqueue(call)
        elif (instance := self._prefetching_instance(call)) is not None:
            self._prefetch(instance, call)
        elif self._free:
            instance = self.gate.acquire_instance(self._free)
            if instance is None:
                self._enqueue(call)
            else:
                self._recent = instance
                call.holder = instance
                instance.run([call])
        else:
            self._enqueue(call)

    def instance_ready(self, instance: InstanceSlot) -> None:
        """Gives the instance the oldest call, or keeps the instance for the next one."""
        self._add_instance(instance)
        if instance in self._ahead:
            self._start_prefetched(instance)
            self._recent = instance
        else:
            self._free.append(instance)
            if instance is self._recent:
                self._recent = None
        if self._queue:
            self.dispatch()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Queued calls wait for another instance, or for a replacement.

        Prefetched calls that cannot be reclaimed run where they are, unless that instance has died.
        """
        super().instance_removed(instance)
        if instance is self._recent:
            self._recent = None
        calls = self._reclaim(instance) if self.instances else []
        while instance in self._ahead:
            self._start_prefetched(instance)
        calls += instance.drain_prefetched()
        self._queue_again(calls)

    def dispatch(self) -> None:
        """Starts the oldest calls where they can start or be prefetched."""
        while self._queue:
            call = next(iter(self._queue))
            instance = self._prefetching_instance(call)
            if instance is not None:
                self._withdraw(call)
                self._prefetch(instance, call)
            elif not self._free or not self._start_oldest():
                return

    def _start_oldest(self) -> bool:
        """Starts the oldest call on one of the free instances, if the gate permits it."""
        instance = self.gate.acquire_instance(self._free)
        if instance is None:
            return False
        call = next(iter(self._queue))
        self._withdraw(call)
        self._recent = instance
        start_batch(instance, [call])
        return True

    def fail_queued(self, error: HostError) -> None:
        """Fails every call that has not started."""
        super().fail_queued(error)
        for ahead in tuple(self._ahead.values()):
            for call in tuple(ahead):
                call.abort(error)

    def cancel_call(self, call: Call) -> bool:
        """Cancels a call that has not started: a queued one, or a prefetched one in its stub."""
        for instance, ahead in self._ahead.items():
            if call in ahead:
                return instance.cancel_call(call)
        return super().cancel_call(call)

    @property
    def queued(self) -> int:
        """Number of calls that have not started."""
        prefetched = sum(not call.finished for ahead in self._ahead.values() for call in ahead)
        return len(self._queue) + prefetched

    # Prefetch

    def _prefetching_instance(self, call: Call) -> InstanceSlot | None:
        """The busy instance that accepts the call as prefetch, if there is one."""
        instance = self._recent
        if instance is None:
            return None
        ahead = self._ahead.get(instance)
        prefetched = len(ahead) if ahead else 0
        if len(self.instances) == 1:
            accepts = not self.may_recover() and instance.accepts_prefetch(call, prefetched)
        else:
            count, idle = len(self.instances), len(self._free)
            accepts = instance.accepts_reclaimable(call, prefetched, count - idle < self._useful)
            if not accepts and not prefetched and not idle and len(self._queue) >= count:
                accepts = instance.accepts_one_reclaimable(call)
        return instance if accepts else None

    def _prefetch(self, instance: InstanceSlot, call: Call) -> None:
        ahead = self._ahead.get(instance)
        if ahead is None:
            ahead = self._ahead[instance] = deque()
        ahead.append(call)
        call.holder = self
        if len(self.instances) == 1:
            instance.run([call])
        else:
            instance.run_reclaimable(call, self._on_returned)
            if self._timer is None:
                self._timer = self._clock.call_later(_RECLAIM_INTERVAL_NS, self._check_progress)

    def _start_prefetched(self, instance: InstanceSlot) -> None:
        """Called when the instance starts the next prefetched call."""
        ahead = self._ahead[instance]
        begun = ahead.popleft()
        if not ahead:
            del self._ahead[instance]
        if not begun.finished:
            begun.holder = instance

    def _check_progress(self) -> None:
        """Reclaims the calls of instances that have started none since the last check.

        While no instance is idle, it waits for some more checks.
        """
        self._timer = None
        before, self._next_calls = self._next_calls, {}
        reclaimed: list[Call] = []
        for instance, ahead in tuple(self._ahead.items()):
            call, checks = before.get(instance, (None, 0))
            checks = checks + 1 if call is ahead[0] else 0
            self._next_calls[instance] = ahead[0], checks
            if checks and len(self.instances) > 1 and (self._free or checks >= _MAX_CHECKS):
                reclaimed += self._reclaim(instance)
        if self._ahead:
            self._timer = self._clock.call_later(_RECLAIM_INTERVAL_NS, self._check_progress)
        self._queue_again(reclaimed)

    def _reclaim(self, instance: InstanceSlot) -> list[Call]:
        """Reclaims the calls that the instance cannot start any more, and gives it no others."""
        if instance not in self._ahead:
            return []
        if instance is self._recent:
            self._recent = None
        calls = list(instance.reclaim_prefetched(len(self._ahead[instance])))
        for call in calls:
            self._remove_prefetched(instance, call)
        return calls

    def _on_returned(self, instance: InstanceSlot, call: Call) -> None:
        """Called when an instance returns a prefetched call, as what it runs has to wait."""
        if instance in self._ahead:
            self._remove_prefetched(instance, call)
        if instance is self._recent:
            self._recent = None
        self._queue_again([call])

    def _remove_prefetched(self, instance: InstanceSlot, call: Call) -> None:
        ahead = self._ahead[instance]
        ahead.remove(call)
        if not ahead:
            del self._ahead[instance]

    def _queue_again(self, calls: list[Call]) -> None:
        """Calls that did not start run before all others, on free instances if there are any."""
        calls = sorted((call for call in calls if not call.finished), key=attrgetter("queued_ns"))
        if not calls:
            return
        for call in reversed(calls):
            self._enqueue(call)
            self._waiting.move_to_front(call)
        while self._queue and self._free and self._start_oldest():
            pass
        self.dispatch()
