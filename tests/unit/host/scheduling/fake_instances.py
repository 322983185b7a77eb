"""Fake instances, a clock that tests control, and helpers that make calls."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from host.errors import HostError, unavailable
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse
from host.scheduling.scheduler import InstanceSlot, Scheduler

TICK = 1_000_000
"""Nanoseconds of one tick of the clock."""


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Counts time in ticks and calls timers `early` ticks before they are due.

    What has arrived is read at once, or when the test says so (`read`).
    """

    def __init__(self, early: int = 0, reads_at_once: bool = True) -> None:
        self._reads_at_once = reads_at_once
        self._after_reading: list[Callable[[], None]] = []
        self.ticks = 1000
        self._early = early
        self._timers: list[tuple[int, int, Timer]] = []
        self._order = itertools.count()

    def now(self) -> int:
        return self.ticks * TICK

    def call_later(self, delay: int, callback: Callable[[], None]) -> Timer:
        assert delay > 0
        timer = Timer(callback)
        at = max(self.now() + 1, self.now() + delay - self._early * TICK)
        heapq.heappush(self._timers, (at, next(self._order), timer))
        return timer

    def call_after_reading(self, callback: Callable[[], None]) -> None:
        if self._reads_at_once:
            callback()
        else:
            self._after_reading.append(callback)

    def read(self) -> None:
        """Runs the callbacks that wait for the event loop to read."""
        waiting, self._after_reading = self._after_reading, []
        for callback in waiting:
            callback()

    @property
    def armed(self) -> int:
        """The number of timers that are still pending."""
        return sum(not timer.cancelled for *_, timer in self._timers)

    def advance(self, ticks: int) -> None:
        """Advances the time tick by tick and runs the timers that are due."""
        for _ in range(ticks):
            self.ticks += 1
            self.run_due()

    def run_due(self) -> None:
        while self._timers and self._timers[0][0] <= self.now():
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                timer.callback()


def is_held_by(call: Call, holder: object) -> bool:
    return call.holder is holder


class FakeInstanceSlot(InstanceSlot):
    """Keeps each batch until the test finishes it; accepts `eager` prefetched batches."""

    blocking_calls: Sequence[Call] = ()

    def __init__(
        self, scheduler: Scheduler, batches: list[list[Call]] | None = None, eager: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.eager = eager
        self.running: list[Call] = []
        self.next: deque[list[Call]] = deque()  # the batches that follow
        self.unstarted: list[Call] = []
        self.left = False
        self.loose: list[Call] = []  # calls of batches that have released the instance
        self.batches = [] if batches is None else batches
        self.cancelled: list[Call] = []

    def run(self, calls: Sequence[Call]) -> None:
        assert calls, "an empty batch"
        assert not any(call.ended for call in calls), "runs a call that has ended"
        assert not self.running, "two batches at a time on one instance"
        assert all(call.holder is self for call in calls)
        self.running = list(calls)
        self.batches.append(list(calls))

    def cancel_call(self, call: Call) -> bool:
        assert call in [*self.running, *self.loose, *self.ahead]
        self.cancelled.append(call)
        return True

    @property
    def ahead(self) -> list[Call]:
        return [call for batch in self.next for call in batch]

    def accepts_prefetch(self, call: Call, prefetched: int) -> bool:
        assert self.running and not call.ended
        assert prefetched == len(self.next)
        return prefetched < self.eager

    def run_prefetched(
        self, call: Call, on_returned: Callable[[InstanceSlot, Call], None] | None
    ) -> None:
        self.next.append([call])

    def drain_prefetched(self) -> Sequence[Call]:
        unstarted, self.unstarted = self.unstarted, []
        return unstarted

    def finish(self) -> None:
        """Finishes the batch with success and frees the instance."""
        calls = self.running
        self._next()
        for call in calls:
            call.respond(InferResponse("m", 1))

    def let_go(self) -> None:
        """Frees the instance while its batch continues."""
        self.loose += self.running
        self._next()

    def _next(self) -> None:
        """Starts the next prefetched batch, unless all of its calls have ended."""
        self.running = self.next.popleft() if self.next else []
        left = bool(self.running) and all(call.finished for call in self.running)
        if self.running and not left:
            self.batches.append(list(self.running))
        self.scheduler.instance_ready(self)
        if left:
            self._next()

    def leave(self) -> None:
        """Leaves the scheduler; still runs the batches that it has."""
        self.scheduler.instance_removed(self)
        self.left = True
        for batch in self.next:
            if any(not call.finished for call in batch):
                self.batches.append(list(batch))

    def come_back(self) -> None:
        """Finishes the batches that it had and joins again."""
        self.left = False
        while self.next:
            for call in self.running:
                call.respond(InferResponse("m", 1))
            self.running = self.next.popleft()
        self.finish()

    def die(self) -> None:
        """Fails all calls that it runs and leaves the scheduler."""
        calls, self.running = self.running, []
        loose, self.loose = self.loose, []
        ahead = self.ahead
        self.next.clear()
        if self.left:
            calls = [*calls, *ahead]
        else:
            self.unstarted = ahead
        for call in calls + loose:
            call.fail(unavailable("died"))
        self.scheduler.instance_removed(self)


def call_of(size: int = 1, kind: str = "", now_ns: int = 0) -> Call:
    """Makes a call of this batch size; calls of one kind can share a batch."""
    return prepared(Call(request_of(size, kind)), now_ns)


def request_of(size: int = 1, kind: str = "", priority: int = 0, timeout: int = 0) -> InferRequest:
    """Makes a request; `timeout` is in ticks."""
    microseconds = timeout * TICK // 1000
    return InferRequest(
        "m", [], batch_size=size, id=kind, priority=priority, timeout_us=microseconds
    )


def prepared(call: Call, now_ns: int) -> Call:
    """Sets the arrival times of the call."""
    call.received_ns = call.queued_ns = now_ns
    return call


def same_kind(first: Call, second: Call) -> bool:
    return first.request.id == second.request.id


def error_of(call: Call) -> HostError | None:
    """Returns the error of a finished call."""
    found: list[HostError | None] = []
    call.subscribe(lambda response, final: found.append(response.error if response else None))
    assert call.finished
    return found[-1]
