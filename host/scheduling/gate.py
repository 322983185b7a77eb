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

        None if the batch has to wait; the queue is told when to ask again.
        """

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Called when an instance is not free any more."""

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

    `permit_of`: the permit of an instance. `again`: makes the queue ask again.
    """

    def __init__(
        self, permit_of: Callable[[InstanceSlot], Permit], again: Callable[[], None]
    ) -> None:
        self._permit_of = permit_of
        self._again = again
        self._chosen: InstanceSlot | None = None

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Takes the instance that was chosen before, or chooses one."""
        instance = self._chosen
        if instance is None or instance not in free:
            instance = min(free, key=lambda instance: self._permit_of(instance).rank)
        if not self._permit_of(instance).request_execution(self._permit_granted):
            self._chosen = instance
            return None
        self._chosen = None
        free.remove(instance)
        return instance

    def _permit_granted(self) -> None:
        instance = self._chosen
        self._again()
        if instance is not None and instance is self._chosen:  # there is nothing to run any more
            self.instance_removed(instance)

    def queue_empty(self) -> None:
        """Withdraws the request for resources that are not needed now."""
        if self._chosen is not None:
            self.instance_removed(self._chosen)

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Withdraws the request for resources of this instance."""
        if instance is self._chosen:
            self._chosen = None
            self._permit_of(instance).release_unused()
