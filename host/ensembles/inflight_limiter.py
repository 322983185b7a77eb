"""How many requests each step of an ensemble may have under way: `max_inflight_requests`."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

from host.scheduling.clock import Clock, LoopClock, Timer

_log = logging.getLogger("pbhost")

_MAX_WAIT_NS = 300 * 1_000_000_000
"""A start that has waited this long is made, whatever is under way (configuration spec 6.3)."""


class Permit:
    """One start of a step: under way from when it is made until its `leave`."""

    __slots__ = ("start", "step", "timer", "waits")

    def __init__(self, step: int, start: Callable[[], None]) -> None:
        self.step = step
        self.start = start
        self.timer: Timer | None = None
        self.waits = False


class InflightLimiter:
    """At most `most` starts of a step under way, over all requests of ensemble `name`.

    Those beyond wait for their turn, first come, first served.
    """

    def __init__(self, name: str, most: int, clock: Clock | None = None) -> None:
        self._name = name
        self._most = most
        self._clock = LoopClock() if clock is None else clock
        self._under_way: Counter[int] = Counter()
        self._waiting: dict[int, OrderedDict[Permit, None]] = {}
        self._serving: set[int] = set()

    def request_permit(self, ticket: Permit) -> None:
        """Make the start, now or when it is its turn."""
        step = ticket.step
        if self._under_way[step] < self._most and not self._waiting.get(step):
            self._under_way[step] += 1
            ticket.start()
        else:
            ticket.waits = True
            ticket.timer = self._clock.call_later(_MAX_WAIT_NS, lambda: self._start_overdue(ticket))
            self._waiting.setdefault(step, OrderedDict())[ticket] = None

    def release_permit(self, ticket: Permit) -> None:
        """What was started has ended, or it need not be started any more."""
        if ticket.waits:
            self._remove_waiting(ticket)
            return
        self._under_way[ticket.step] -= 1
        self._start_waiting(ticket.step)

    def _start_waiting(self, step: int) -> None:
        """Let the next ones start: a loop, for each may fail at once and leave."""
        if step in self._serving:
            return
        self._serving.add(step)
        try:
            waiting = self._waiting.get(step)
            while waiting and self._under_way[step] < self._most:
                self._start(next(iter(waiting)))
        finally:
            self._serving.discard(step)

    def _start(self, ticket: Permit) -> None:
        self._remove_waiting(ticket)
        self._under_way[ticket.step] += 1
        ticket.start()

    def _remove_waiting(self, ticket: Permit) -> None:
        del self._waiting[ticket.step][ticket]
        ticket.waits = False
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None

    def _start_overdue(self, ticket: Permit) -> None:
        if not ticket.waits:
            return
        _log.error(
            "ensemble '%s': a request of step %d has waited %d s for one of the %d that are under"
            " way to end; it goes ahead. Raise 'max_inflight_requests', or find out why they do"
            " not end",
            self._name, ticket.step, _MAX_WAIT_NS // 1_000_000_000, self._under_way[ticket.step],
        )  # fmt: skip
        self._start(ticket)
