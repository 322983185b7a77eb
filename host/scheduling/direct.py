"""First come, first served: each call is a batch of its own (configuration spec 4.1)."""

from __future__ import annotations

from collections import deque

from host.errors import HostError
from host.inference.request import Call
from host.scheduling.queue import LaneQueue, start
from host.scheduling.scheduler import Lane
from host.scheduling.waiting import Fifo


class DirectScheduler(LaneQueue):
    """The scheduler of a model whose configuration names none.

    A lane that is the only one is sent the next calls while it runs one still, as far as it takes
    them: it need not wait for them then. They count as queued until they have begun.
    """

    def __init__(self) -> None:
        self._waiting = Fifo()
        super().__init__(self._waiting)
        self._ahead: deque[Call] = deque()
        self._ahead_at: Lane | None = None  # who has them

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
                call.holder = lane
                call.on_cancel = lane.cancel
                lane.run([call])
        elif (lane := self._taker(call)) is not None:
            self._send_ahead(lane, call)
        else:
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

        Those that were sent ahead run where they are, unless that has died before.
        """
        super().lane_gone(lane)
        while lane is self._ahead_at:
            self._begin_ahead()
        for call in reversed(lane.drain_prefetched()):
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
        while self._queue:
            call = next(iter(self._queue))
            lane = self._taker(call)
            if lane is None:
                return
            self._withdraw(call)
            self._send_ahead(lane, call)

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started."""
        super().fail_queued(error)
        for call in tuple(self._ahead):
            call.abort(error)

    @property
    def queued(self) -> int:
        """Calls that have not started."""
        return len(self._queue) + sum(not call.finished for call in self._ahead)

    def _taker(self, call: Call) -> Lane | None:
        """The only lane, which is busy, if it takes the call ahead."""
        if len(self.lanes) != 1:
            return None
        lane = self.lanes[0]
        return lane if lane.accepts_prefetch(call, len(self._ahead)) else None

    def _send_ahead(self, lane: Lane, call: Call) -> None:
        self._ahead.append(call)
        self._ahead_at = lane
        call.holder = self
        call.on_cancel = lane.cancel
        lane.run([call])

    def _begin_ahead(self) -> None:
        """The lane has come to the next call that it was sent ahead."""
        lane = self._ahead_at
        begun = self._ahead.popleft()
        if not self._ahead:
            self._ahead_at = None
        if not begun.finished:
            begun.holder = lane
