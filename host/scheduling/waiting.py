"""Calls that wait, in the order in which they are served; any of them may leave at any time."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Protocol

from host.errors import unavailable
from host.inference.request import Call
from host.scheduling.policy import QueuePolicies, QueuePolicy

NEVER = 1 << 100
"""A time that does not come."""


class CallQueue(Protocol):
    """Calls that wait. Adding and removing one takes the same time however many there are."""

    def add(self, call: Call) -> None:
        """Let the call wait. Raises HostError if there is no room for it."""

    def remove(self, call: Call) -> None:
        """The call, which waits here, does so no more."""

    def expire_calls(self, now: int) -> Sequence[Call]:
        """Do what the policies say about calls whose time is over; those to be refused, removed."""

    @property
    def next_timeout(self) -> int:
        """When the next call's time is over: nanoseconds, `NEVER` if none's will be."""

    def __iter__(self) -> Iterator[Call]:
        """The calls in the order in which they are served."""

    def __len__(self) -> int:
        """How many wait."""


class FifoQueue(OrderedDict[Call, None]):
    """First come, first served, with room for all.

    It is linked: a plain dict would step over everything that has left before its first key.
    """

    next_timeout = NEVER
    remove = OrderedDict.__delitem__

    def add(self, call: Call) -> None:
        """Let the call wait."""
        self[call] = None

    def move_to_front(self, call: Call) -> None:
        """The call, which waits here, is the next one."""
        self.move_to_end(call, last=False)

    def expire_calls(self, now: int) -> Sequence[Call]:
        """Nothing is ever over."""
        return ()


class _Level:
    """The calls of one priority: those whose time runs, with its end, and those that are late."""

    __slots__ = ("number", "policy", "live", "late")

    def __init__(self, number: int, policy: QueuePolicy) -> None:
        self.number = number
        self.policy = policy
        self.live: OrderedDict[Call, None] = OrderedDict()
        self.late: OrderedDict[Call, None] = OrderedDict()


class PolicyQueue:
    """Calls by priority, with limits on how many and how long (configuration spec 4.5, 4.6)."""

    def __init__(self, policies: QueuePolicies) -> None:
        self._policies = policies
        self._levels: dict[int, _Level] = {}  # as they are met: there may be 2 ** 64
        self._in_order: list[_Level] = []
        self._ends: list[tuple[int, int, Call]] = []  # a heap; also of calls that have left
        self._numbers = itertools.count()
        self._count = 0

    def add(self, call: Call) -> None:
        """Let the call wait. Raises HostError UNAVAILABLE if its level is full."""
        level = self._level(call)
        policy = level.policy
        if policy.max_size and len(level.live) + len(level.late) >= policy.max_size:
            name = call.request.id or "<id_unknown>"
            raise unavailable(f"[request id: {name}] Exceeds maximum queue size")
        level.live[call] = None
        self._count += 1
        timeout = policy.timeout_ns(call.request)
        if timeout:
            end = call.queued_ns + timeout + 1
            heapq.heappush(self._ends, (end, next(self._numbers), call))
            if len(self._ends) > 2 * self._count + 64:
                self._ends = [each for each in self._ends if self._is_live(each[2])]
                heapq.heapify(self._ends)

    def remove(self, call: Call) -> None:
        """The call does not wait any more."""
        level = self._level(call)
        if call in level.live:
            del level.live[call]
        else:
            del level.late[call]
        self._count -= 1

    def expire_calls(self, now: int) -> Sequence[Call]:
        """Those whose time is over go to the end of their level, or are removed and returned."""
        refused: list[Call] = []
        while self._ends and self._ends[0][0] <= now:
            call = heapq.heappop(self._ends)[2]
            if not self._is_live(call):
                continue
            level = self._level(call)
            if level.policy.delays:
                del level.live[call]
                level.late[call] = None
            else:
                self.remove(call)
                refused.append(call)
        return refused

    @property
    def next_timeout(self) -> int:
        """When the next call's time is over."""
        ends = self._ends
        while ends and not self._is_live(ends[0][2]):
            heapq.heappop(ends)
        return ends[0][0] if ends else NEVER

    def __iter__(self) -> Iterator[Call]:
        for level in self._in_order:
            yield from level.live
            yield from level.late

    def __len__(self) -> int:
        return self._count

    def _is_live(self, call: Call) -> bool:
        """Whether the call still waits, and has not waited too long."""
        return call in self._level(call).live

    def _level(self, call: Call) -> _Level:
        number = self._policies.priority_level(call.request)
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level(number, self._policies.policy_of_level(number))
            insort(self._in_order, level, key=attrgetter("number"))
        return level
