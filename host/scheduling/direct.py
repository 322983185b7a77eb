"""First come, first served: each call is a batch of its own (configuration spec 4.1)."""

from __future__ import annotations

from collections import deque

from host.errors import HostError
from host.inference import Call
from host.scheduling.scheduler import Lane


class DirectScheduler:
    """The scheduler of a model whose configuration names none."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._free: list[Lane] = []
        self._queue: deque[Call] = deque()

    def submit(self, call: Call) -> None:
        """Start the call if a lane is free, else queue it."""
        if self._free:
            _start(self._free.pop(), call)
            return
        call.place = self
        call.on_cancel = self._remove
        self._queue.append(call)

    def lane_free(self, lane: Lane) -> None:
        """Give the lane the oldest call, or keep it for the next one."""
        if lane not in self.lanes:
            self.lanes.append(lane)
        if self._queue:
            _start(lane, self._queue.popleft())
        else:
            self._free.append(lane)

    def lane_gone(self, lane: Lane) -> None:
        """Queued calls wait for another lane, or for this one to come back."""
        if lane in self.lanes:
            self.lanes.remove(lane)
        if lane in self._free:
            self._free.remove(lane)

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started."""
        while self._queue:
            self._queue.popleft().fail(error)

    @property
    def queued(self) -> int:
        """Calls that have not started."""
        return len(self._queue)

    def _remove(self, call: Call) -> None:
        self._queue.remove(call)


def _start(lane: Lane, call: Call) -> None:
    call.place = lane
    call.on_cancel = lane.cancel
    lane.run([call])
