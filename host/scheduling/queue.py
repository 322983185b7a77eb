"""What schedulers of one queue share: the lanes, the free ones, and those who wait for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from host.errors import HostError
from host.inference.request import Call
from host.scheduling.gate import Gate, OpenGate
from host.scheduling.scheduler import Lane
from host.scheduling.waiting import Fifo, Waiting


class LaneQueue(ABC):
    """Calls that wait, and the lanes that will run them."""

    def __init__(self, queue: Waiting | None = None) -> None:
        self.lanes: list[Lane] = []
        self.lane_returns: Callable[[], bool] = lambda: False
        self.gate: Gate = OpenGate()
        self._free: list[Lane] = []
        self._queue: Waiting = Fifo() if queue is None else queue
        self._withdraw = self._queue.remove

    @abstractmethod
    def dispatch(self) -> None:
        """Start what can be started."""

    def lane_gone(self, lane: Lane) -> None:
        """Queued calls wait for another lane, or for this one to come back."""
        if lane in self.lanes:
            self.lanes.remove(lane)
        if lane in self._free:
            self._free.remove(lane)
        self.gate.gone(lane)

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started."""
        while self._queue:
            call = next(iter(self._queue))
            self._withdraw(call)
            self.refuse(call, error)
        self.gate.idle()

    @property
    def queued(self) -> int:
        """Calls that have not started."""
        return len(self._queue)

    def _enqueue(self, call: Call) -> None:
        """Let the call wait. Raises HostError if there is no room for it."""
        self._queue.add(call)
        call.holder = self
        call.on_cancel = self._leave

    def _leave(self, call: Call) -> None:
        """A call that waits is cancelled."""
        self._withdraw(call)
        if not self._queue:
            self.gate.idle()

    def refuse(self, call: Call, error: HostError) -> None:
        """Answer a call that is not, or no longer, in the queue and will not run."""
        call.fail(error)

    def _join(self, lane: Lane) -> None:
        if lane not in self.lanes:
            self.lanes.append(lane)


def start(lane: Lane, calls: list[Call]) -> None:
    """Run a batch; from here on its calls belong to the lane."""
    for call in calls:
        call.holder = lane
        call.on_cancel = lane.cancel
    lane.run(calls)
