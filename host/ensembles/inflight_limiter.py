"""Limits the requests in flight of each step of an ensemble: `max_inflight_requests`."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

from host.scheduling.clock import Clock, LoopClock, Timer

_log = logging.getLogger("pbhost")

_MAX_WAIT_NS = 300 * 1_000_000_000
"""A permit is granted after this time, whatever is in flight.

Source: docs/reference/configuration-and-scheduling.md, "Execution".
"""


class Permit:
    """The permit of one step execution, held from its start to `release_permit`."""

    __slots__ = ("start", "step", "timer", "waits")

    def __init__(self, step: int, start: Callable[[], None]) -> None:
        self.step = step
        self.start = start
        self.timer: Timer | None = None
        self.waits = False


class InflightLimiter:
    """Grants at most `most` permits for each step, over all requests of ensemble `name`.

    Further requests for permits wait, first come, first served.
    """

    def __init__(self, name: str, most: int, clock: Clock | None = None) -> None:
        self._name = name
        self._most = most
        self._clock = LoopClock() if clock is None else clock
        self._under_way: Counter[int] = Counter()
        self._waiting: dict[int, OrderedDict[Permit, None]] = {}
        self._serving: set[int] = set()

    def request_permit(self, permit: Permit) -> None:
        """Grants the permit now, or as soon as it is free."""
        step = permit.step
        if self._under_way[step] < self._most and not self._waiting.get(step):
            self._under_way[step] += 1
            permit.start()
        else:
            permit.waits = True
            permit.timer = self._clock.call_later(_MAX_WAIT_NS, lambda: self._start_overdue(permit))
            self._waiting.setdefault(step, OrderedDict())[permit] = None

    def release_permit(self, permit: Permit) -> None:
        """Returns a permit, or withdraws a request for one."""
        if permit.waits:
            self._remove_waiting(permit)
            return
        self._under_way[permit.step] -= 1
        self._start_waiting(permit.step)

    def _start_waiting(self, step: int) -> None:
        """Grants free permits, in a loop: a start may fail at once and return its permit."""
        if step in self._serving:
            return
        self._serving.add(step)
        try:
            waiting = self._waiting.get(step)
            while waiting and self._under_way[step] < self._most:
                self._start(next(iter(waiting)))
        finally:
            self._serving.discard(step)

    def _start(self, permit: Permit) -> None:
        self._remove_waiting(permit)
        self._under_way[permit.step] += 1
        permit.start()

    def _remove_waiting(self, permit: Permit) -> None:
        del self._waiting[permit.step][permit]
        permit.waits = False
        if permit.timer is not None:
            permit.timer.cancel()
            permit.timer = None

    def _start_overdue(self, permit: Permit) -> None:
        if not permit.waits:
            return
        _log.error(
            "ensemble '%s': a request of step %d waited %d s for one of %d running requests to"
            " finish; continuing without it. Raise 'max_inflight_requests', or find out why they"
            " do not finish",
            self._name, permit.step, _MAX_WAIT_NS // 1_000_000_000, self._under_way[permit.step],
        )  # fmt: skip
        self._start(permit)
