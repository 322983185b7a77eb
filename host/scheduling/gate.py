"""Which of a model's free lanes runs the next batch, and whether one may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from host.scheduling.rate_limiter import Permit
from host.scheduling.scheduler import Lane


class Gate(Protocol):
    """Asked by a queue that has a batch to run."""

    def take(self, free: list[Lane]) -> Lane | None:
        """Take from `free`, which is not empty, a lane to run a batch now.

        None if there has to be a wait; the queue hears when it may ask again.
        """

    def gone(self, lane: Lane) -> None:
        """This lane is not free any more."""

    def idle(self) -> None:
        """There is no batch to run any more."""


class OpenGate:
    """Without limits: the lane that was used last."""

    def take(self, free: list[Lane]) -> Lane | None:
        """Any will do."""
        return free.pop()

    def gone(self, lane: Lane) -> None:
        """That is of no matter."""

    def idle(self) -> None:
        """Nor is that."""


class LimitedGate:
    """With a rate limiter: the lane of the lowest rank, once its resources are there.

    `permit_of` gives a lane's permit; `again` has the queue ask again.
    """

    def __init__(self, permit_of: Callable[[Lane], Permit], again: Callable[[], None]) -> None:
        self._permit_of = permit_of
        self._again = again
        self._chosen: Lane | None = None

    def take(self, free: list[Lane]) -> Lane | None:
        """The lane that was chosen before, or a new choice."""
        lane = self._chosen
        if lane is None or lane not in free:
            lane = min(free, key=lambda lane: self._permit_of(lane).rank)
        if not self._permit_of(lane).ask(self._granted):
            self._chosen = lane
            return None
        self._chosen = None
        free.remove(lane)
        return lane

    def _granted(self) -> None:
        lane = self._chosen
        self._again()
        if lane is not None and lane is self._chosen:  # there is nothing to run any more
            self.gone(lane)

    def idle(self) -> None:
        """Nobody is to wait for resources that this model does not need now."""
        if self._chosen is not None:
            self.gone(self._chosen)

    def gone(self, lane: Lane) -> None:
        """Nobody is to wait for this lane's resources."""
        if lane is self._chosen:
            self._chosen = None
            self._permit_of(lane).give_back()
