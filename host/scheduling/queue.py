"""What first-come-first-served schedulers share: the lanes, the free ones, and those who wait."""

from __future__ import annotations

from collections import deque

from host.errors import HostError
from host.inference import Call
from host.scheduling.scheduler import Lane


class LaneQueue:
    """Calls in order of arrival, and the lanes that will run them."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._free: list[Lane] = []
        self._queue: deque[Call] = deque()

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

    def _enqueue(self, call: Call) -> None:
        call.place = self
        call.on_cancel = self._queue.remove
        self._queue.append(call)

    def _join(self, lane: Lane) -> None:
        if lane not in self.lanes:
            self.lanes.append(lane)


def start(lane: Lane, calls: list[Call]) -> None:
    """Run a batch; from here on its calls belong to the lane."""
    for call in calls:
        call.place = lane
        call.on_cancel = lane.cancel
    lane.run(calls)
