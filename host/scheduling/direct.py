"""First come, first served: each call is a batch of its own (configuration spec 4.1)."""

from __future__ import annotations

from host.errors import HostError
from host.inference import Call
from host.scheduling.queue import LaneQueue, start
from host.scheduling.scheduler import Lane
from host.scheduling.waiting import Fifo


class DirectScheduler(LaneQueue):
    """The scheduler of a model whose configuration names none.

    A lane that is the only one is sent the next call while it runs one still, if it takes it: it
    need not wait for it then. The call counts as queued until it has begun.
    """

    def __init__(self) -> None:
        self._waiting = Fifo()
        super().__init__(self._waiting)
        self._ahead: Call | None = None
        self._ahead_at: Lane | None = None  # who has it

    def reserve(self, call: Call) -> None:
        """A call has arrived; without an order of responses that is of no matter yet."""

    def submit(self, call: Call) -> None:
        """Start the call if a lane is free, else queue it."""
        if self._queue:
            self._enqueue(call)
        elif self._free:
            lane = self.gate.take(self._free)
            if lane is None:
                self._enqueue(call)
            else:
                call.place = lane
                call.on_cancel = lane.cancel
                lane.run([call])
        elif self._ahead is not None or not self._send_ahead(call):
            self._enqueue(call)

    def lane_free(self, lane: Lane) -> None:
        """Give the lane the oldest call, or keep it for the next one."""
        if lane not in self.lanes:
            self._join(lane)
        if lane is self._ahead_at:
            self._begin_ahead()
        else:
            self._free.append(lane)
        if self._queue:
            self.dispatch()

    def lane_gone(self, lane: Lane) -> None:
        """Queued calls wait for another lane, or for this one to come back.

        One that was sent ahead runs where it is, unless that has died before.
        """
        super().lane_gone(lane)
        if lane is self._ahead_at:
            self._begin_ahead()
        for call in lane.take_unstarted():
            if not call.finished:
                self._enqueue(call)
                self._waiting.to_front(call)

    def dispatch(self) -> None:
        """Start the oldest calls, as long as there are lanes for them."""
        while self._queue and self._free:
            lane = self.gate.take(self._free)
            if lane is None:
                return
            call = next(iter(self._queue))
            self._withdraw(call)
            start(lane, [call])
        if self._queue and self._ahead is None:
            call = next(iter(self._queue))
            self._withdraw(call)
            if not self._send_ahead(call):
                self._enqueue(call)
                self._waiting.to_front(call)

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started."""
        super().fail_queued(error)
        if self._ahead is not None:
            self._ahead.abandon(error)

    @property
    def queued(self) -> int:
        """Calls that have not started."""
        return len(self._queue) + (self._ahead is not None and not self._ahead.finished)

    def _send_ahead(self, call: Call) -> bool:
        """Send the call to the only lane, which is busy; False if that cannot be."""
        if len(self.lanes) != 1:
            return False
        lane = self.lanes[0]
        if not lane.takes_ahead(call):
            return False
        self._ahead, self._ahead_at = call, lane
        call.place = self
        call.on_cancel = lane.cancel
        lane.run([call])
        return True

    def _begin_ahead(self) -> None:
        """The lane has come to the call that it was sent ahead."""
        ahead, lane = self._ahead, self._ahead_at
        self._ahead = self._ahead_at = None
        if ahead is not None and not ahead.finished:
            ahead.place = lane
