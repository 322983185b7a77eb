"""What schedulers with one queue share: the queue, the instances, and the free instances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from host.errors import HostError
from host.inference.call import Call, CallHolder
from host.scheduling.gate import ExecutionGate, OpenGate
from host.scheduling.scheduler import InstanceSlot
from host.scheduling.waiting import CallQueue, FifoQueue


class InstanceQueue(CallHolder, ABC):
    """Queued calls, and the instances that will run them."""

    def __init__(self, queue: CallQueue | None = None) -> None:
        self.instances: list[InstanceSlot] = []
        self._members: set[InstanceSlot] = set()  # the same: a list is searched one by one
        self.may_recover: Callable[[], bool] = lambda: False
        self.gate: ExecutionGate = OpenGate()
        self._free: list[InstanceSlot] = []
        self._queue: CallQueue = FifoQueue() if queue is None else queue
        self._withdraw = self._queue.remove

    @abstractmethod
    def dispatch(self) -> None:
        """Starts what can be started."""

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Queued calls wait for another instance, or for a replacement."""
        if instance in self._members:
            self._members.remove(instance)
            self.instances.remove(instance)
        if instance in self._free:
            self._free.remove(instance)
        self.gate.instance_removed(instance)

    def fail_queued(self, error: HostError) -> None:
        """Fails every call that has not started."""
        while self._queue:
            call = next(iter(self._queue))
            self._withdraw(call)
            self.refuse(call, error)
        self.gate.queue_empty()

    @property
    def queued(self) -> int:
        """Number of calls that have not started."""
        return len(self._queue)

    def _enqueue(self, call: Call) -> None:
        """Queues the call. Raises HostError if the queue is full."""
        self._queue.add(call)
        call.holder = self

    def cancel_call(self, call: Call) -> bool:
        """Removes a queued call; no model has it."""
        self._withdraw(call)
        if not self._queue:
            self.gate.queue_empty()
        return False

    def refuse(self, call: Call, error: HostError) -> None:
        """Fails a call that is not in the queue and will not run."""
        call.fail(error)

    def _add_instance(self, instance: InstanceSlot) -> None:
        if instance not in self._members:
            self._members.add(instance)
            self.instances.append(instance)


def start_batch(instance: InstanceSlot, calls: list[Call]) -> None:
    """Runs a batch; from here on the instance holds its calls."""
    for call in calls:
        call.holder = instance
    instance.run(calls)
