"""The queue of a scheduler: waiting requests, queue policies, and the gate to instances."""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from host.config.schema import ConfigPart
from host.errors import HostError, unavailable
from host.inference.call import Call
from host.inference.request import InferRequest
from host.scheduling.rate_limiter import Permit
from host.scheduling.scheduler import InstanceSlot, Scheduler

_DELAY = 1  # ModelQueuePolicy.TimeoutAction


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The limits of one priority level.

    `timeout_us`: microseconds, 0 for none. `max_size`: requests, 0 for no limit. `may_shorten`: a
    request may set a shorter timeout. `delays`: a request that timed out is served after the others
    of its level instead of being refused. Source: docs/reference/scheduling.md,
    "Queue policies".
    """

    timeout_us: int = 0
    may_shorten: bool = False
    delays: bool = False
    max_size: int = 0

    def timeout_ns(self, request: InferRequest) -> int:
        """Nanoseconds that the request may wait, 0 for any time."""
        asked = request.timeout_us
        if self.may_shorten and 0 < asked < self.timeout_us:
            return asked * 1000
        return self.timeout_us * 1000


@dataclass(frozen=True, slots=True)
class QueuePolicies:
    """The policies of all priority levels; `levels` 0: priorities are ignored."""

    levels: int = 0
    default_level: int = 0
    default: QueuePolicy = QueuePolicy()
    own: Mapping[int, QueuePolicy] = field(default_factory=dict)

    def priority_level(self, request: InferRequest) -> int:
        """The level of a request; 1 is served first.

        Source: docs/reference/scheduling.md, "Priorities".
        """
        if 0 < request.priority <= self.levels:
            return request.priority
        return self.default_level if self.levels else 0

    def policy_of_level(self, level: int) -> QueuePolicy:
        """The limits of a level."""
        return self.own.get(level, self.default)

    @property
    def need_policy_queue(self) -> bool:
        """Whether anything differs from an unlimited first-come-first-served queue."""
        return self.levels > 0 or self.default.timeout_us > 0 or self.default.max_size > 0


def read_queue_policies(batching: ConfigPart) -> QueuePolicies:
    """Reads a `ModelDynamicBatching` message."""
    return QueuePolicies(
        batching.priority_levels,
        batching.default_priority_level,
        _policy(batching.default_queue_policy),
        {
            level: _policy(policy)
            for level, policy in batching.priority_queue_policy.items()
            if batching.priority_levels
        },
    )


def _policy(message: ConfigPart) -> QueuePolicy:
    return QueuePolicy(
        timeout_us=message.default_timeout_microseconds,
        may_shorten=message.allow_timeout_override,
        delays=message.timeout_action == _DELAY,
        max_size=message.max_queue_size,
    )


NEVER = 1 << 100
"""A time that is never reached."""


class FifoQueue(OrderedDict[Call, None]):
    """First come, first served, without a limit.

    It is a linked list: a plain dict would skip all removed keys before its first one.
    """

    next_timeout = NEVER
    add = OrderedDict.setdefault
    remove = OrderedDict.__delitem__

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

    Source: docs/reference/scheduling.md, "Priorities" and "Queue policies".
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


class ExecutionGate(Protocol):
    """Called by a queue that has a batch to run."""

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Removes from `free`, which is not empty, the instance that runs a batch now.

        None if the batch has to wait; the queue is notified when to ask again.
        """

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Called when an instance is no longer free."""

    def queue_empty(self) -> None:
        """Called when there is no batch to run any more."""


class OpenGate:
    """Without a rate limiter: the instance that was used last."""

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Takes the last one."""
        return free.pop()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Does nothing."""

    def queue_empty(self) -> None:
        """Does nothing."""


class LimitedGate:
    """With a rate limiter: the instance of the lowest rank, once it has its resources.

    All free instances wait for theirs, as one that needs less may get them although the first one
    never does.

    `permit_of`: the permit of an instance. `again`: makes the queue ask again.
    """

    def __init__(
        self, permit_of: Callable[[InstanceSlot], Permit], again: Callable[[], None]
    ) -> None:
        self._permit_of = permit_of
        self._again = again
        self._waiting: dict[InstanceSlot, Permit] = {}

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """Takes the first instance whose resources are granted."""
        for instance in sorted(free, key=lambda instance: self._permit_of(instance).rank):
            permit = self._permit_of(instance)
            if permit.request_execution(self._permit_granted):
                free.remove(instance)
                self._waiting.pop(instance, None)
                for other in self._waiting.values():
                    other.withdraw_request()
                self._waiting.clear()
                return instance
            self._waiting[instance] = permit
        return None

    def _permit_granted(self) -> None:
        self._again()
        if any(permit.granted for permit in self._waiting.values()):
            self.queue_empty()  # there is nothing to run any more

    def queue_empty(self) -> None:
        """Withdraws the requests for resources that are not needed now."""
        waiting, self._waiting = self._waiting, {}
        for permit in waiting.values():
            permit.release_unused()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Withdraws the request for resources of this instance."""
        permit = self._waiting.pop(instance, None)
        if permit is not None:
            permit.release_unused()


class InstanceQueue(Scheduler):
    """Queued calls, and the instances that will run them."""

    def __init__(self, queue: FifoQueue | PolicyQueue | None = None) -> None:
        self.instances: list[InstanceSlot] = []
        self._members: set[InstanceSlot] = set()  # the same: a list is searched one by one
        self.may_recover: Callable[[], bool] = lambda: False
        self.gate: ExecutionGate = OpenGate()
        self._free: list[InstanceSlot] = []
        self._queue: FifoQueue | PolicyQueue = FifoQueue() if queue is None else queue
        self._withdraw = self._queue.remove

    def limit_executions(self, permit_of: Callable[[InstanceSlot], Permit]) -> None:
        """As described by Scheduler."""
        self.gate = LimitedGate(permit_of, self.dispatch)

    @abstractmethod
    def dispatch(self) -> None:
        """Starts what can be started."""

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Queued calls wait for another instance, or for a replacement."""
        if instance in self._members:
            self._members.remove(instance)
            self.instances.remove(instance)
        if instance in self._free:
            self._free.remove(instance)
        self.gate.instance_removed(instance)

    def fail_queued(self, error: HostError) -> None:
        """Fails every call that has not started."""
        while self._queue:
            call = next(iter(self._queue))
            self._withdraw(call)
            self.refuse(call, error)
        self.gate.queue_empty()

    @property
    def queued(self) -> int:
        """Number of calls that have not started."""
        return len(self._queue)

    def _enqueue(self, call: Call) -> None:
        """Queues the call. Raises HostError if the queue is full."""
        self._queue.add(call)
        call.holder = self

    def cancel_call(self, call: Call) -> bool:
        """Removes a queued call; no model has it."""
        self._withdraw(call)
        if not self._queue:
            self.gate.queue_empty()
        return False

    def refuse(self, call: Call, error: HostError) -> None:
        """Fails a call that is not in the queue and will not run."""
        call.fail(error)

    def _add_instance(self, instance: InstanceSlot) -> None:
        self._members.add(instance)
        self.instances.append(instance)


def start_batch(instance: InstanceSlot, calls: list[Call]) -> None:
    """Runs a batch; from here on the instance holds its calls."""
    for call in calls:
        call.holder = instance
    instance.run(calls)
