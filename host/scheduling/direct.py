"""First come, first served: each call is a batch of its own.

Source: docs/reference/configuration_and_scheduling.md, 4.1.
"""

from __future__ import annotations

from collections import deque

from host.errors import HostError
from host.inference.call import Call
from host.scheduling.queue import InstanceQueue, start_batch
from host.scheduling.scheduler import InstanceSlot
from host.scheduling.waiting import FifoQueue


class DirectScheduler(InstanceQueue):
    """The scheduler of a model whose configuration names none.

    The only instance of a model gets the next calls (prefetch) while it still runs one, as many as
    it accepts. They count as queued until they have started. There is no prefetch while another
    instance is being replaced, which may be free earlier.
    """

    def __init__(self) -> None:
        self._waiting = FifoQueue()
        super().__init__(self._waiting)
        self._ahead: deque[Call] = deque()
        self._ahead_at: InstanceSlot | None = None  # the instance that has them

    def reserve(self, call: Call) -> None:
        """Does nothing, as responses have no order."""

    def submit(self, call: Call) -> None:
        """Starts the call if an instance is free, otherwise queues it."""
        if self._queue:
            self._enqueue(call)
        elif self._free:
            instance = self.gate.acquire_instance(self._free)
            if instance is None:
                self._enqueue(call)
            else:
                call.holder = instance
                instance.run([call])
        elif (instance := self._prefetching_instance(call)) is not None:
            self._prefetch(instance, call)
        else:
            self._enqueue(call)

    def instance_ready(self, instance: InstanceSlot) -> None:
        """Gives the instance the oldest call, or keeps the instance for the next one."""
        self._add_instance(instance)
        if instance is self._ahead_at:
            self._start_prefetched()
        else:
            self._free.append(instance)
        if self._queue:
            self.dispatch()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Queued calls wait for another instance, or for a replacement.

        Prefetched calls run where they are, unless that instance has died.
        """
        super().instance_removed(instance)
        while instance is self._ahead_at:
            self._start_prefetched()
        for call in reversed(instance.drain_prefetched()):
            if not call.finished:
                self._enqueue(call)
                self._waiting.move_to_front(call)

    def dispatch(self) -> None:
        """Starts the oldest calls while there are free instances."""
        while self._queue and self._free:
            instance = self.gate.acquire_instance(self._free)
            if instance is None:
                return
            call = next(iter(self._queue))
            self._withdraw(call)
            start_batch(instance, [call])
        while self._queue:
            call = next(iter(self._queue))
            instance = self._prefetching_instance(call)
            if instance is None:
                return
            self._withdraw(call)
            self._prefetch(instance, call)

    def fail_queued(self, error: HostError) -> None:
        """Fails every call that has not started."""
        super().fail_queued(error)
        for call in tuple(self._ahead):
            call.abort(error)

    def cancel_call(self, call: Call) -> bool:
        """Cancels a call that has not started: a queued one, or a prefetched one in its stub."""
        if self._ahead_at is not None and call in self._ahead:
            return self._ahead_at.cancel_call(call)
        return super().cancel_call(call)

    @property
    def queued(self) -> int:
        """Number of calls that have not started."""
        return len(self._queue) + sum(not call.finished for call in self._ahead)

    def _prefetching_instance(self, call: Call) -> InstanceSlot | None:
        """The only instance, if it is busy and accepts the call as prefetch."""
        if len(self.instances) != 1 or self.may_recover():
            return None
        instance = self.instances[0]
        return instance if instance.accepts_prefetch(call, len(self._ahead)) else None

    def _prefetch(self, instance: InstanceSlot, call: Call) -> None:
        self._ahead.append(call)
        self._ahead_at = instance
        call.holder = self
        instance.run([call])

    def _start_prefetched(self) -> None:
        """Called when the instance starts the next prefetched call."""
        instance = self._ahead_at
        begun = self._ahead.popleft()
        if not self._ahead:
            self._ahead_at = None
        if not begun.finished:
            begun.holder = instance
