"""Queues of calls, in the order in which they run; any call may leave at any time."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Protocol

from host.errors import unavailable
from host.inference.call import Call
from host.scheduling.policy import QueuePolicies, QueuePolicy

NEVER = 1 << 100
"""A time that is never reached."""


class CallQueue(Protocol):
    """A queue of calls. The time to add and to remove one does not depend on their number."""

    def add(self, call: Call) -> None:
        """Queues the call. Raises HostError if the queue is full."""

    def remove(self, call: Call) -> None:
        """Removes a queued call."""

    def expire_calls(self, now: int) -> Sequence[Call]:
        """Applies the policies to calls that timed out; removes and returns those to refuse."""

    @property
    def next_timeout(self) -> int:
        """The time of the next timeout in nanoseconds, `NEVER` if there is none."""

    def __iter__(self) -> Iterator[Call]:
        """The calls in the order in which they run."""

    def __len__(self) -> int:
        """Number of queued calls."""


class FifoQueue(OrderedDict[Call, None]):
    """First come, first served, without a limit.

    It is a linked list: a plain dict would skip all removed keys before its first one.
    """

    next_timeout = NEVER
    remove = OrderedDict.__delitem__

    def add(self, call: Call) -> None:
        """Queues the call."""
        self[call] = None

    def move_to_front(self, call: Call) -> None:
        """Makes a queued call the next one."""
        self.move_to_end(call, last=False)

    def expire_calls(self, now: int) -> Sequence[Call]:
        """Returns nothing, as there are no timeouts."""
        return ()


class _Level:
    """The calls of one priority: those with a running timeout, and those that timed out."""

    __slots__ = ("number", "policy", "live", "late")

    def __init__(self, number: int, policy: QueuePolicy) -> None:
        self.number = number
        self.policy = policy
        self.live: OrderedDict[Call, None] = OrderedDict()
        self.late: OrderedDict[Call, None] = OrderedDict()


class PolicyQueue:
    """Calls by priority, with limits on number and time.

    Source: docs/reference/configuration-and-scheduling.md, "Priorities" and "Queue policies".
    """

    def __init__(self, policies: QueuePolicies) -> None:
        self._policies = policies
        self._levels: dict[int, _Level] = {}  # made on demand, as there may be 2 ** 64
        self._in_order: list[_Level] = []
        self._ends: list[tuple[int, int, Call]] = []  # a heap; may contain calls that have left
        self._numbers = itertools.count()
        self._count = 0

    def add(self, call: Call) -> None:
        """Queues the call. Raises HostError UNAVAILABLE if its level is full."""
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
        """Removes a queued call."""
        level = self._level(call)
        if call in level.live:
            del level.live[call]
        else:
            del level.late[call]
        self._count -= 1

    def expire_calls(self, now: int) -> Sequence[Call]:
        """Moves calls that timed out to the end of their level, or removes and returns them."""
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
        """The time of the next timeout."""
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
        """Whether the call is still queued and has not timed out."""
        return call in self._level(call).live

    def _level(self, call: Call) -> _Level:
        number = self._policies.priority_level(call.request)
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level(number, self._policies.policy_of_level(number))
            insort(self._in_order, level, key=attrgetter("number"))
        return level
