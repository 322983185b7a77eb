"""First come, first served: each call is a batch of its own.

Source: docs/reference/scheduling.md, "Default scheduler".
"""

from __future__ import annotations

import math
from collections import deque
from itertools import takewhile
from operator import attrgetter

from host.errors import HostError, unavailable
from host.inference.call import Call, CallState
from host.scheduling.queue import FifoQueue, InstanceQueue, start_batch
from host.scheduling.scheduler import Clock, InstanceSlot, LoopClock, Timer

_FINISHED = CallState.FINISHED
_RECLAIM_INTERVAL_NS = 2_000_000
"""Prefetched calls are reclaimed from an instance that has started none of them for so long."""

_OVERDUE_NS = 8_000_000
"""A call that an instance got as its next one is reclaimed if it has not started for so long."""


class DirectScheduler(InstanceQueue):
    """The scheduler of a model whose configuration names none.

    An instance may get the next calls (prefetch) while it still runs one. They count as queued
    until they have started. The only instance of a model gets as many as it accepts, but none while
    another instance is being replaced, which may be free earlier.

    Of several instances, only the one that was given work last gets calls in advance, and only if
    it is so fast that they start earlier than on an instance that has to wake up. If it becomes
    slow, the calls are reclaimed for other instances (docs/explanation/decisions/0038). `cpus`: the
    number that the server and its instances may use.

    While all of several instances are busy, each of them may get its next call in advance; an
    instance that becomes idle while no call is queued takes the one that was given first. A call
    that has returned stays in the queue until an instance can start it.
    """

    def __init__(self, clock: Clock | None = None, cpus: float = math.inf) -> None:
        self._waiting = FifoQueue()
        super().__init__(self._waiting)
        self._clock = LoopClock() if clock is None else clock
        self._useful = max(1, cpus - 1)  # busy instances, besides which no other finds a core
        self._recent: InstanceSlot | None = None  # the one that was given work last, if it is busy
        self._single = False  # whether no instance besides the only one is being replaced
        self._ahead: dict[InstanceSlot, deque[Call]] = {}  # the prefetched calls, where they are
        # Busy instances that may get their next call in advance, the first to have started first.
        # One that refuses a call is asked again when it has started another one.
        self._without_next: dict[InstanceSlot, None] = {}
        # Instances that got it as all were busy, and when that was; the first to get it first.
        self._with_next: dict[InstanceSlot, int] = {}
        self._newest_returned_ns = -1  # arrival of the newest call that has returned
        self._timer: Timer | None = None
        # The first and the last of `_ahead` at the last check.
        self._checked: dict[InstanceSlot, tuple[Call, Call]] = {}

    def submit(self, call: Call) -> None:
        """Starts the call if an instance is free, otherwise queues it."""
        if self._queue:
            self._enqueue(call)
        elif self._recent and self._prefetch(self._recent, call):
            pass
        elif self._free:
            instance = self.gate.acquire_instance(self._free)
            if instance is None:
                self._enqueue(call)
            else:
                self._recent = instance
                self._without_next[instance] = None
                call.holder = instance
                instance.run([call])
        elif (instance := self._instance_without_next(call)) is not None:
            self._prefetch(instance, call, as_next=True)
        else:
            self._enqueue(call)

    def instance_ready(self, instance: InstanceSlot) -> None:
        """Gives the instance the oldest call, or keeps the instance for the next one."""
        if instance not in self._members:
            self._add_instance(instance)
        ahead = self._ahead.get(instance)
        if ahead is None:
            self._free.append(instance)
            self._give_nothing_ahead(instance)
        else:  # it starts the next prefetched call
            started = ahead.popleft()
            if self._with_next:
                self._with_next.pop(instance, None)
            if not ahead:
                del self._ahead[instance]
                self._without_next[instance] = None
            if started.state is not _FINISHED:
                started.holder = instance
        if self._queue:
            self.dispatch()
        elif self._free and self._with_next:
            self._start_next_calls_of_others()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Queued calls wait for another instance, or for a replacement.

        Prefetched calls that cannot be reclaimed run where they are, unless that instance has died.
        """
        super().instance_removed(instance)
        self._single = False
        calls = self._reclaim(instance) if self.instances else []
        for call in self._ahead.pop(instance, ()):
            if not call.finished:
                call.holder = instance
        self._with_next.pop(instance, None)
        self._give_nothing_ahead(instance)
        calls += instance.drain_prefetched()
        self._queue_again(calls)
        self._single = False  # its supervisor says only after this that it may recover

    def dispatch(self) -> None:
        """Starts the oldest calls where they can start or be prefetched."""
        while self._queue:
            call = next(iter(self._queue))
            if self._recent and self._prefetch(self._recent, call, queued=True):
                pass
            elif self._free:
                if not self._start_oldest():
                    return
            elif (instance := self._instance_without_next(call)) is not None:
                self._prefetch(instance, call, queued=True, as_next=True)
            else:
                return

    def _start_oldest(self) -> bool:
        """Starts the oldest call on one of the free instances, if the gate permits it."""
        instance = self.gate.acquire_instance(self._free)
        if instance is None:
            return False
        call = next(iter(self._queue))
        self._withdraw(call)
        self._recent = instance
        self._without_next[instance] = None
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

    def _prefetch(
        self, instance: InstanceSlot, call: Call, queued: bool = False, as_next: bool = False
    ) -> bool:
        """Gives a busy instance the call in advance, if it accepts it.

        `queued`: the call leaves the queue, before it is given: one that cannot be sent fails at
        once. `as_next`: it is the next call, as all are busy; the instance has accepted that.
        """
        ahead = self._ahead.get(instance)
        prefetched = len(ahead) if ahead else 0
        if len(self.instances) == 1:
            if not self._single:
                self._single = not self.may_recover()
            if not (self._single and instance.accepts_prefetch(call, prefetched)):
                return False
            on_returned = None
        else:
            busy = len(self.instances) - len(self._free)
            if not as_next and not instance.accepts_reclaimable(
                call, prefetched, busy < self._useful
            ):
                return False
            on_returned = self._on_returned
            if self._timer is None:
                self._timer = self._clock.call_later(_RECLAIM_INTERVAL_NS, self._check_progress)
        if queued:
            self._withdraw(call)
        instance.run_prefetched(call, on_returned)
        if call.state is not _FINISHED:  # otherwise it could not be sent
            if ahead is None:
                ahead = self._ahead[instance] = deque()
            ahead.append(call)
            call.holder = self
            self._without_next.pop(instance, None)
            if as_next:
                self._with_next[instance] = self._clock.now()
        return True

    def _instance_without_next(self, call: Call) -> InstanceSlot | None:
        """The instance that gets the call as its next one, as all are busy.

        It is the one that is likely to end first of those that accept the call.
        """
        if len(self.instances) > 1 and call.queued_ns > self._newest_returned_ns:
            while self._without_next:
                instance = next(iter(self._without_next))
                if instance.accepts_next(call):
                    return instance
                del self._without_next[instance]
        return None

    def _start_next_calls_of_others(self) -> None:
        """Starts calls that other instances got as their next ones on the idle ones."""
        for instance in tuple(self._with_next):
            self._queue_again(self._reclaim(instance))
            if not self._free:
                return

    def _give_nothing_ahead(self, instance: InstanceSlot) -> None:
        """Gives the instance no call in advance before it has started another one."""
        self._without_next.pop(instance, None)
        if instance is self._recent:
            self._recent = None

    def _check_progress(self) -> None:
        """Reclaims the calls of instances that have started none since the last check.

        While another instance is idle, also those of instances that have not started all of them.
        While none is, an instance has more time for its next call.
        """
        self._timer = None
        overdue = self._clock.now() - _OVERDUE_NS
        before, self._checked = self._checked, {}
        reclaimed: list[Call] = []
        for instance, ahead in tuple(self._ahead.items()):
            first, last = before.get(instance, (None, None))
            self._checked[instance] = ahead[0], ahead[-1]
            if self._free:
                waits = last in ahead
            else:
                waits = first is ahead[0] and self._with_next.get(instance, overdue) <= overdue
            if waits and len(self.instances) > 1:
                reclaimed += self._reclaim(instance)
        if self._ahead:
            self._timer = self._clock.call_later(_RECLAIM_INTERVAL_NS, self._check_progress)
        self._queue_again(reclaimed)

    def _reclaim(self, instance: InstanceSlot) -> list[Call]:
        """Reclaims the calls that the instance can no longer start, and gives it no others."""
        if instance not in self._ahead:
            return []
        self._give_nothing_ahead(instance)
        calls = list(instance.reclaim_prefetched(len(self._ahead[instance])))
        for call in calls:
            self._remove_prefetched(instance, call)
        return calls

    def _on_returned(self, instance: InstanceSlot, call: Call) -> None:
        """Called when an instance returns a prefetched call, as what it runs has to wait."""
        if instance in self._ahead:
            self._remove_prefetched(instance, call)
        self._give_nothing_ahead(instance)
        if self.instances or self.may_recover():
            self._queue_again([call])
        else:
            reason = "the instance that had this request is being unloaded, and no other is left"
            call.holder = None
            call.abort(call.cancellation_error or unavailable(reason))

    def _remove_prefetched(self, instance: InstanceSlot, call: Call) -> None:
        ahead = self._ahead[instance]
        ahead.remove(call)
        if not ahead:
            del self._ahead[instance]
            self._with_next.pop(instance, None)

    def _queue_again(self, calls: list[Call]) -> None:
        """Calls that did not start run before younger ones, on free instances if there are any.

        Those whose stub was told to cancel them end.
        """
        if not calls:
            return
        cancelled: list[tuple[Call, HostError]] = []
        again: list[Call] = []
        for call in calls:
            if call.cancellation_error is not None:
                call.holder = None
                cancelled.append((call, call.cancellation_error))
            elif not call.finished:
                again.append(call)
        if again:
            newest = max(call.queued_ns for call in again)
            self._newest_returned_ns = max(self._newest_returned_ns, newest)
            again += takewhile(lambda call: call.queued_ns < newest, self._queue)
        again.sort(key=attrgetter("queued_ns"))
        for call in reversed(again):
            self._enqueue(call)
            self._waiting.move_to_front(call)
        for call, error in cancelled:
            call.abort(error)
        while self._queue and self._free and self._start_oldest():
            pass
        self.dispatch()
