"""First come, first served: each call is a batch of its own (configuration spec 4.1)."""

from __future__ import annotations

from host.inference import Call
from host.scheduling.queue import LaneQueue, start
from host.scheduling.scheduler import Lane


class DirectScheduler(LaneQueue):
    """The scheduler of a model whose configuration names none."""

    def submit(self, call: Call) -> None:
        """Start the call if a lane is free, else queue it."""
        if self._free and not self._queue:
            lane = self.gate.take(self._free)
            if lane is not None:
                start(lane, [call])
                return
        self._enqueue(call)

    def lane_free(self, lane: Lane) -> None:
        """Give the lane the oldest call, or keep it for the next one."""
        self._join(lane)
        self._free.append(lane)
        if self._queue:
            self.dispatch()

    def dispatch(self) -> None:
        """Start the oldest calls, as long as there are lanes for them."""
        while self._queue and self._free:
            lane = self.gate.take(self._free)
            if lane is None:
                return
            call = next(iter(self._queue))
            self._withdraw(call)
            start(lane, [call])
