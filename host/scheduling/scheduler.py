"""What schedulers have in common: their interface, clocks, gates, queues and queue policies."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from host.errors import HostError
from host.inference.call import Call, CallHolder


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


class InstanceSlot(CallHolder, ABC):
    """Runs batches, one at a time."""

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> None:
        """Runs a batch. The scheduler's `instance_ready` is called when the next one may start.

        That may be before the calls of this one have ended.
        """

    @abstractmethod
    def accepts_prefetch(self, call: Call, prefetched: int) -> bool:
        """Whether it takes this call while it runs another one, and `prefetched` more.

        It starts the call as soon as it would be free; `instance_ready` is called for each.
        """

    def accepts_reclaimable(self, call: Call, prefetched: int, finds_core: bool) -> bool:
        """Whether it takes this call as prefetch although the model has other instances.

        `finds_core`: whether there is a core for one more of them. Only a fast instance accepts;
        by default none does, and then `run_reclaimable` is not called.
        """
        return False

    def accepts_next(self, call: Call) -> bool:
        """Whether it takes this call as its next one, as all of several instances are busy.

        By default it does not.
        """
        return False

    def run_reclaimable(
        self, call: Call, on_returned: Callable[[InstanceSlot, Call], None]
    ) -> None:
        """Runs a prefetched call that may be reclaimed until it starts.

        `on_returned` is called if the instance does not run it, as the batch before it waits for
        another model.
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


class Scheduler(Protocol):
    """Takes calls, and runs them in batches on free instances; each call exactly once."""

    instances: list[InstanceSlot]
    """Every instance that is alive, free or busy."""

    may_recover: Callable[[], bool]
    """Whether an instance that was removed is being replaced; set by the model."""

    def reserve(self, call: Call) -> None:
        """Called when a call arrives that may be answered from the cache or be submitted later.

        It has its place in the order of responses from now on.
        """

    def submit(self, call: Call) -> None:
        """Queues a call or starts it at once. Raises HostError if the queue is full."""

    def refuse(self, call: Call, error: HostError) -> None:
        """Fails a call that was reserved, or taken from the queue, and will not run."""

    def instance_ready(self, instance: InstanceSlot) -> None:
        """Called when the instance can take a batch; an unknown instance is added."""

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Called when the instance takes no batches any more, until it is ready again."""

    def fail_queued(self, error: HostError) -> None:
        """Fails every call that has not started."""

    @property
    def queued(self) -> int:
        """Number of calls that have not started."""
