"""The contract between a model's queue and the places where its batches run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from host.errors import HostError
from host.inference.request import Call, CallHolder


class InstanceSlot(CallHolder, ABC):
    """Runs batches, one at a time."""

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> None:
        """Runs a batch. The scheduler's `instance_ready` is called when the next one may come.

        That may be before the calls of this one have ended.
        """

    @abstractmethod
    def cancel(self, call: Call) -> bool:
        """Cancels a call that runs here; returns whether its model has started it."""

    @abstractmethod
    def accepts_prefetch(self, call: Call, prefetched: int) -> bool:
        """Whether it takes this call while it runs another one, and `prefetched` more.

        It starts the call as soon as it would be free; `instance_ready` is called for each.
        """

    @abstractmethod
    def drain_prefetched(self) -> Sequence[Call]:
        """Returns, once, the prefetched calls that it had not started when it died."""


class Scheduler(Protocol):
    """Calls in, batches out to free instances. Nothing is lost and nothing runs twice."""

    instances: list[InstanceSlot]
    """Every instance that is alive, free or busy."""

    may_recover: Callable[[], bool]
    """Whether a instance that has gone is on its way back; the model says."""

    def reserve(self, call: Call) -> None:
        """A call that may be answered without being run, or be submitted later, has arrived.

        It has its place in the order of responses from now on.
        """

    def submit(self, call: Call) -> None:
        """Queue a call or start it at once. Raises HostError if too many are queued."""

    def refuse(self, call: Call, error: HostError) -> None:
        """End a call that was reserved, or taken from the queue, and will not run."""

    def instance_ready(self, instance: InstanceSlot) -> None:
        """This instance can take a batch; a instance not heard of before joins."""

    def instance_removed(self, instance: InstanceSlot) -> None:
        """This instance takes nothing any more, until it is free again."""

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started."""

    @property
    def queued(self) -> int:
        """Calls that have not started."""
