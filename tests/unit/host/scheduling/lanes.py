"""Lanes that run nothing, a clock that a test moves, and calls to queue."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from host.errors import HostError, unavailable
from host.inference import Call, InferRequest, InferResponse
from host.scheduling.scheduler import Scheduler

TICK_NS = 1953125
"""Nanoseconds of 1/512 s: every time that is a multiple of it is exact in floating point."""


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """An event loop's clock and timers, in ticks."""

    def __init__(self) -> None:
        self.ticks = 1000
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    @property
    def ns(self) -> int:
        return self.ticks * TICK_NS

    def time(self) -> float:
        return self.ticks / 512

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        assert delay > 0
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.time() + delay, next(self._order), timer))
        return timer

    @property
    def armed(self) -> int:
        """Timers that will still call somebody."""
        return sum(not timer.cancelled for *_, timer in self._timers)

    def advance(self, ticks: int) -> None:
        """Let time pass, tick by tick, as timers come due."""
        for _ in range(ticks):
            self.ticks += 1
            self.run_due()

    def run_due(self) -> None:
        while self._timers and self._timers[0][0] <= self.time():
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                timer.callback()


@contextmanager
def running(clock: Clock) -> Iterator[Clock]:
    """The clock in place of the running event loop, for the dynamic scheduler."""
    replaced = SimpleNamespace(get_running_loop=lambda: clock)
    with mock.patch("host.scheduling.dynamic.asyncio", replaced):
        yield clock


class FakeLane:
    """Keeps what it is given until the test ends it."""

    def __init__(self, scheduler: Scheduler, batches: list[list[Call]] | None = None) -> None:
        self.scheduler = scheduler
        self.running: list[Call] = []
        self.batches = [] if batches is None else batches
        self.cancelled: list[Call] = []
        self.waiting_for: Sequence[Call] = ()

    def run(self, calls: Sequence[Call]) -> None:
        assert calls, "an empty batch"
        assert not self.running, "two batches at a time on one lane"
        assert not any(call.finished or call.cancelled for call in calls), "runs what has ended"
        assert all(call.place is self for call in calls)
        self.running = list(calls)
        self.batches.append(list(calls))

    def cancel(self, call: Call) -> None:
        assert call in self.running
        self.cancelled.append(call)

    def finish(self) -> None:
        """The batch ends well, and the lane is free."""
        calls, self.running = self.running, []
        self.scheduler.lane_free(self)
        for call in calls:
            call.respond(InferResponse("m", 1))

    def die(self) -> None:
        """The process behind it ends, with what it ran."""
        calls, self.running = self.running, []
        for call in calls:
            call.fail(unavailable("died"))
        self.scheduler.lane_gone(self)


def call_of(size: int = 1, kind: str = "", now_ns: int = 0) -> Call:
    """A call with a batch dimension; those of one kind fit together."""
    call = Call(InferRequest("m", [], batch_size=size, id=kind))
    call.queued_ns = now_ns
    return call


def same_kind(first: Call, second: Call) -> bool:
    return first.request.id == second.request.id


def error_of(call: Call) -> HostError | None:
    """The error with which a call has ended."""
    found: list[HostError | None] = []
    call.subscribe(lambda response, final: found.append(response.error if response else None))
    assert call.finished
    return found[-1]
