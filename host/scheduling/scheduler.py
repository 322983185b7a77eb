"""The contract between a model's queue and the places where its batches run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from host.errors import HostError
from host.inference.request import Call


class Lane(Protocol):
    """One place to run batches, one at a time."""

    def run(self, calls: Sequence[Call]) -> None:
        """Run a batch; the scheduler hears `lane_free` when the next one may come.

        That may be before the calls of this one have ended.
        """

    def cancel(self, call: Call) -> bool:
        """Nobody waits any more for a call that runs here; whether its model has begun with it."""

    def accepts_prefetch(self, call: Call, ahead: int) -> bool:
        """Whether this call may be given to it now, while it runs another one and has been given
        so many more.

        It begins it once it would be free; `lane_free` is called for each of them.
        """

    def drain_prefetched(self) -> Sequence[Call]:
        """The calls that it was sent ahead and has not begun when it died; told once."""

    @property
    def waiting_for(self) -> Sequence[Call]:
        """The calls that must end before the batch that runs here can go on."""

    @property
    def may_wait_for(self) -> Sequence[Sequence[Call]]:
        """What each batch that has not ended has asked for without being held up by it as yet.

        One of these batches has to end before the lane is free; none if it is free.
        """


class Scheduler(Protocol):
    """Calls in, batches out to free lanes. Nothing is lost and nothing runs twice."""

    lanes: list[Lane]
    """Every lane that is alive, free or busy."""

    lane_returns: Callable[[], bool]
    """Whether a lane that has gone is on its way back; the model says."""

    def reserve(self, call: Call) -> None:
        """A call that may be answered without being run, or be submitted later, has arrived.

        It has its place in the order of responses from now on.
        """

    def submit(self, call: Call) -> None:
        """Queue a call or start it at once. Raises HostError if too many are queued."""

    def refuse(self, call: Call, error: HostError) -> None:
        """End a call that was reserved, or taken from the queue, and will not run."""

    def lane_free(self, lane: Lane) -> None:
        """This lane can take a batch; a lane not heard of before joins."""

    def lane_gone(self, lane: Lane) -> None:
        """This lane takes nothing any more, until it is free again."""

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started."""

    @property
    def queued(self) -> int:
        """Calls that have not started."""
