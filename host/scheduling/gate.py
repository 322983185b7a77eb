"""Which of a model's free instances runs the next batch, and whether one may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from host.scheduling.rate_limiter import Permit
from host.scheduling.scheduler import InstanceSlot


class ExecutionGate(Protocol):
    """Asked by a queue that has a batch to run."""

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Take from `free`, which is not empty, a instance to run a batch now.

        None if there has to be a wait; the queue hears when it may ask again.
        """

    def instance_removed(self, instance: InstanceSlot) -> None:
        """This instance is not free any more."""

    def queue_empty(self) -> None:
        """There is no batch to run any more."""


class OpenGate:
    """Without limits: the instance that was used last."""

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Any will do."""
        return free.pop()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """That is of no matter."""

    def queue_empty(self) -> None:
        """Nor is that."""


class LimitedGate:
    """With a rate limiter: the instance of the lowest rank, once its resources are there.

    `permit_of` gives a instance's permit; `again` has the queue ask again.
    """

    def __init__(
        self, permit_of: Callable[[InstanceSlot], Permit], again: Callable[[], None]
    ) -> None:
        self._permit_of = permit_of
        self._again = again
        self._chosen: InstanceSlot | None = None

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """The instance that was chosen before, or a new choice."""
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
        """Nobody is to wait for resources that this model does not need now."""
        if self._chosen is not None:
            self.instance_removed(self._chosen)

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Nobody is to wait for this instance's resources."""
        if instance is self._chosen:
            self._chosen = None
            self._permit_of(instance).release_unused()
