"""Calls that fit together run together, up to the largest batch (configuration spec 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from host.inference import Call
from host.scheduling.queue import LaneQueue, start
from host.scheduling.scheduler import Lane

Compatible = Callable[[Call, Call], bool]
"""Whether two calls may share a batch (configuration spec 4.7)."""


class DynamicScheduler(LaneQueue):
    """A free lane takes, in order of arrival, as many calls as may share a batch.

    With a queue delay, a batch that is not full waits for company until its oldest call is
    `delay` seconds old. Preferred sizes below the largest, priorities and queue policies are not
    used: they shape batches, not answers.
    """

    def __init__(self, max_batch_size: int, delay: float, compatible: Compatible) -> None:
        super().__init__()
        self._max = max(1, max_batch_size)
        self._delay = delay
        self._compatible = compatible
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, call: Call) -> None:
        """Queue the call; it starts when a lane is free and its batch is due."""
        self._enqueue(call)
        if self._free:
            self._dispatch()

    def lane_free(self, lane: Lane) -> None:
        """Give the lane a batch if one is due."""
        self._join(lane)
        self._free.append(lane)
        if self._queue:
            self._dispatch()

    def _dispatch(self) -> None:
        while self._free and self._queue:
            count, full = self._next_batch()
            wait = 0.0 if full else self._due_in()
            if wait > 0.0:
                self._wake_in(wait)
                return
            start(self._free.pop(), [self._queue.popleft() for _ in range(count)])

    def _next_batch(self) -> tuple[int, bool]:
        """How many calls from the head of the queue go together, and whether no more can join."""
        first = self._queue[0]
        size = count = 0
        for call in self._queue:
            grown = size + call.request.batch_size
            if count and (grown > self._max or not self._compatible(first, call)):
                return count, True
            size, count = grown, count + 1
        return count, size >= self._max

    def _due_in(self) -> float:
        """Seconds until the oldest call has waited long enough."""
        if self._delay <= 0.0:
            return 0.0
        loop = asyncio.get_running_loop()
        return self._queue[0].queued_ns / 1e9 + self._delay - loop.time()

    def _wake_in(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._dispatch()
