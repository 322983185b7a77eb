"""Chooses the free instance that runs the next batch, and whether it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from host.scheduling.rate_limiter import Permit
from host.scheduling.scheduler import InstanceSlot


class ExecutionGate(Protocol):
    """Called by a queue that has a batch to run."""

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Removes from `free`, which is not empty, the instance that runs a batch now.

        None if the batch has to wait; the queue is notified when to ask again.
        """

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Called when an instance is no longer free."""

    def queue_empty(self) -> None:
        """Called when there is no batch to run any more."""


class OpenGate:
    """Without a rate limiter: the instance that was used last."""

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Takes the last one."""
        return free.pop()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Does nothing."""

    def queue_empty(self) -> None:
        """Does nothing."""


class LimitedGate:
    """With a rate limiter: the instance of the lowest rank, once it has its resources.

    All free instances wait for theirs, as one that needs less may get them although the first one
    never does.

    `permit_of`: the permit of an instance. `again`: makes the queue ask again.
    """

    def __init__(
        self, permit_of: Callable[[InstanceSlot], Permit], again: Callable[[], None]
    ) -> None:
        self._permit_of = permit_of
        self._again = again
        self._waiting: dict[InstanceSlot, Permit] = {}

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Takes the first instance whose resources are granted."""
        for instance in sorted(free, key=lambda instance: self._permit_of(instance).rank):
            permit = self._permit_of(instance)
            if permit.request_execution(self._permit_granted):
                free.remove(instance)
                self._waiting.pop(instance, None)
                for other in self._waiting.values():
                    other.withdraw_request()
                self._waiting.clear()
                return instance
            self._waiting[instance] = permit
        return None

    def _permit_granted(self) -> None:
        self._again()
        if any(permit.granted for permit in self._waiting.values()):
            self.queue_empty()  # there is nothing to run any more

    def queue_empty(self) -> None:
        """Withdraws the requests for resources that are not needed now."""
        waiting, self._waiting = self._waiting, {}
        for permit in waiting.values():
            permit.release_unused()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Withdraws the request for resources of this instance."""
        permit = self._waiting.pop(instance, None)
        if permit is not None:
            permit.release_unused()
