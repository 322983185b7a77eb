"""First come, first served: each call is a batch of its own (configuration spec 4.1)."""

from __future__ import annotations

from host.inference import Call
from host.scheduling.queue import LaneQueue, start
from host.scheduling.scheduler import Lane


class DirectScheduler(LaneQueue):
    """The scheduler of a model whose configuration names none."""

    def submit(self, call: Call) -> None:
        """Start the call if a lane is free, else queue it."""
        if self._free:
            start(self._free.pop(), [call])
        else:
            self._enqueue(call)

    def lane_free(self, lane: Lane) -> None:
        """Give the lane the oldest call, or keep it for the next one."""
        self._join(lane)
        if self._queue:
            call = next(iter(self._queue))
            self._withdraw(call)
            start(lane, [call])
        else:
            self._free.append(lane)
