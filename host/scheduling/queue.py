"""What schedulers of one queue share: the instances, the free ones, and those who wait for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from host.errors import HostError
from host.inference.request import Call, CallHolder
from host.scheduling.gate import ExecutionGate, OpenGate
from host.scheduling.scheduler import InstanceSlot
from host.scheduling.waiting import CallQueue, FifoQueue


class InstanceQueue(CallHolder, ABC):
    """Calls that wait, and the instances that will run them."""

    def __init__(self, queue: CallQueue | None = None) -> None:
        self.instances: list[InstanceSlot] = []
        self.may_recover: Callable[[], bool] = lambda: False
        self.gate: ExecutionGate = OpenGate()
        self._free: list[InstanceSlot] = []
        self._queue: CallQueue = FifoQueue() if queue is None else queue
        self._withdraw = self._queue.remove

    @abstractmethod
    def dispatch(self) -> None:
        """Start what can be started."""

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Queued calls wait for another instance, or for this one to come back."""
        if instance in self.instances:
            self.instances.remove(instance)
        if instance in self._free:
            self._free.remove(instance)
        self.gate.instance_removed(instance)

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started."""
        while self._queue:
            call = next(iter(self._queue))
            self._withdraw(call)
            self.refuse(call, error)
        self.gate.queue_empty()

    @property
    def queued(self) -> int:
        """Calls that have not started."""
        return len(self._queue)

    def _enqueue(self, call: Call) -> None:
        """Let the call wait. Raises HostError if there is no room for it."""
        self._queue.add(call)
        call.holder = self
        call.on_cancel = self._remove_cancelled

    def _remove_cancelled(self, call: Call) -> None:
        """A call that waits is cancelled."""
        self._withdraw(call)
        if not self._queue:
            self.gate.queue_empty()

    def refuse(self, call: Call, error: HostError) -> None:
        """Answer a call that is not, or no longer, in the queue and will not run."""
        call.fail(error)

    def _add_instance(self, instance: InstanceSlot) -> None:
        if instance not in self.instances:
            self.instances.append(instance)


def start_batch(instance: InstanceSlot, calls: list[Call]) -> None:
    """Run a batch; from here on its calls belong to the instance."""
    for call in calls:
        call.holder = instance
        call.on_cancel = instance.cancel
    instance.run(calls)
