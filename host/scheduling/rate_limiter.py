"""The rate limiter: grants resources to executions when there are not enough for all.

Source: docs/reference/configuration-and-scheduling.md, "Rate limiter".
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from host.errors import HostError, invalid_argument
from host.inference.call import CallHolder

_Pool = tuple[str, int | None]
"""A resource and its device; None: one pool for all devices."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What one execution needs of a resource; `shared`: one pool for all devices."""

    name: str
    count: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What the executions of one instance need; `priority` 2 runs half as often as 1."""

    resources: Sequence[Resource] = ()
    device: int = 0
    priority: int = 1

    @property
    def pools(self) -> Iterator[tuple[_Pool, int]]:
        """The amount needed of each pool."""
        for resource in self.resources:
            yield (resource.name, None if resource.shared else self.device), resource.count


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """The amount of a resource on one device, or (None) on every device."""

    name: str
    count: int
    device: int | None = None


class RateLimiter:
    """Grants resources to one execution after the other, those of the lowest rank first.

    An execution that needs resources overtakes the first one only if it is asked to (`overtake`),
    even if there is enough for it; one that needs none does not wait. Without `allowances`, there
    is as much of each resource as the most demanding instance needs; with them, they are the limit.
    Belongs to the event loop.
    """

    def __init__(self, allowances: Iterable[ResourceLimit] = ()) -> None:
        self._allowed: dict[_Pool, int] = {}
        for given in allowances:
            key = given.name, given.device
            self._allowed[key] = min(given.count, self._allowed.get(key, given.count))
        self._permits: dict[Permit, None] = {}
        self._limits: dict[_Pool, int] = {}
        self._used: Counter[_Pool] = Counter()
        self._staged: dict[Permit, int] = {}  # the order in which they were reserved
        self._numbers = itertools.count()

    def permit(self, need: ResourceRequest) -> Permit:
        """The permit of a new instance. Raises HostError if it could never run."""
        permit = Permit(self, need)
        self._permits[permit] = None
        try:
            self._limits = self._compute_limits()
        except HostError:
            del self._permits[permit]
            raise
        self._grant_waiting()  # the needs of this instance may have raised the limits
        return permit

    def _compute_limits(self) -> dict[_Pool, int]:
        needed: dict[_Pool, int] = {}
        for permit in self._permits:
            for pool, count in permit.need.pools:
                needed[pool] = max(count, needed.get(pool, 0))
        for name, device in needed:
            if device is not None and (name, None) in needed:
                raise invalid_argument(
                    f'Resource "{name}" is present as both global and device-specific resource in'
                    " the model configuration."
                )
        if not self._allowed:
            return needed
        limits = {pool: self._limit(pool) for pool in needed}
        for pool, count in needed.items():
            if limits[pool] < count:
                raise invalid_argument(
                    f'Resource count for "{pool[0]}" is limited to {limits[pool]} which will'
                    " prevent scheduling of one or more model instances, the minimum required"
                    f" count is {count}"
                )
        return limits

    def _limit(self, pool: _Pool) -> int:
        name, device = pool
        if device is None:
            given = (count for (known, _), count in self._allowed.items() if known == name)
            return max(given, default=0)
        return self._allowed.get(pool, self._allowed.get((name, None), 0))

    def holders(self, permit: Permit) -> list[CallHolder]:
        """The owners of the executions; one of them has to end before this permit is granted.

        They have resources that it needs; if all that it needs is free and it waits for its turn,
        resources that the first one needs. Empty if it need not wait, or if an execution that holds
        resources will end by itself.
        """
        lacking = self._lacking_pools(permit)
        if not lacking and permit in self._staged:
            lacking = self._lacking_pools(self._first_waiting())
        found = [
            other
            for other in self._permits
            if other.active and any(pool in lacking for pool, _ in other.need.pools)
        ]
        owners = [other.owner for other in found if other.running and other.owner is not None]
        return owners if len(owners) == len(found) else []

    def _lacking_pools(self, permit: Permit) -> list[_Pool]:
        """The pools that have less left than the permit needs."""
        used, limits = self._used, self._limits
        return [pool for pool, count in permit.need.pools if count > limits[pool] - used[pool]]

    def _first_waiting(self) -> Permit:
        return min(self._staged, key=lambda permit: (permit.rank, self._staged[permit]))

    def _remove_permit(self, permit: Permit) -> None:
        if self._permits.pop(permit, self) is None:
            self._limits = self._compute_limits()

    def _reserve(self, permit: Permit) -> None:
        if not any(count for _, count in permit.need.pools):
            permit.grant()
            return
        self._staged[permit] = next(self._numbers)
        self._grant_waiting()

    def _unreserve(self, permit: Permit) -> bool:
        return self._staged.pop(permit, None) is not None

    def _return_resources(self, permit: Permit) -> None:
        self._used.subtract(dict(permit.need.pools))
        self._grant_waiting()

    def _grant_waiting(self) -> None:
        """Grants what can be granted."""
        while self._staged and self._grant_if_enough(self._first_waiting()):
            pass

    def _grant_if_enough(self, permit: Permit) -> bool:
        """Grants a waiting permit if all that it needs is free; whether it was granted."""
        if self._lacking_pools(permit):
            return False
        self._used.update(dict(permit.need.pools))
        del self._staged[permit]
        permit.grant()
        return True

    def _overtake(self, permit: Permit) -> bool:
        return permit in self._staged and self._grant_if_enough(permit)


class Permit:
    """The permit of one instance to run a batch: requested, granted, used, returned."""

    def __init__(self, limiter: RateLimiter, need: ResourceRequest) -> None:
        self.need = need
        self.granted = False
        """Whether resources are reserved for its next execution."""
        self.running = 0
        """Number of its executions that have not ended."""
        self.owner: CallHolder | None = None
        """What runs when it is granted, for the deadlock detector."""
        self._executions = 0
        self._limiter = limiter
        self._told: Callable[[], None] | None = None
        self._asking = False

    @property
    def rank(self) -> int:
        """Lower ranks go first: the number of executions, which counts more at a low priority."""
        return self._executions * max(1, self.need.priority)

    @property
    def active(self) -> bool:
        """Whether it holds resources."""
        return self.granted or self.running > 0

    @property
    def holders(self) -> list[CallHolder]:
        """The owners of the executions that it waits for, or would have to wait for."""
        return self._limiter.holders(self)

    def request_execution(self, granted: Callable[[], None]) -> bool:
        """Whether the next execution may start now; otherwise `granted` is called when it may."""
        if not self.granted and self._told is None:
            self._told = granted
            self._asking = True
            self._limiter._reserve(self)
            self._asking = False
        return self.granted

    def grant(self) -> None:
        """Reserves the resources."""
        self.granted = True
        told, self._told = self._told, None
        if told is not None and not self._asking:
            told()

    def overtake(self) -> bool:
        """Reserves the resources before its turn, if it waits for nothing else.

        The deadlock detector calls this for a permit that would never be granted.
        """
        return self._limiter._overtake(self)

    def start_execution(self) -> None:
        """Starts the execution that the resources are reserved for."""
        self.granted = False
        self.running += 1
        self._executions += 1
        self._limiter._grant_waiting()  # others of its model may have been withdrawn

    def finish_execution(self) -> None:
        """Ends an execution and returns its resources."""
        self.running -= 1
        self._limiter._return_resources(self)

    def withdraw_request(self) -> bool:
        """Stops waiting; whether it did wait. Others that may run now are not granted yet."""
        self._told = None
        return self._limiter._unreserve(self)

    def release_unused(self) -> None:
        """Returns reserved resources, as there is no execution now."""
        if self.withdraw_request():
            self._limiter._grant_waiting()  # the others may have waited for this one
        elif self.granted:
            self.granted = False
            self._limiter._return_resources(self)

    def close(self) -> None:
        """Removes the instance and its needs."""
        self.release_unused()
        self._limiter._remove_permit(self)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Holds the resources while the instance is loaded and warmed up, without a scheduler.

        This counts as two executions, also without warm-up requests, as in Triton.
        """
        granted = asyncio.Event()
        try:
            if not self.request_execution(granted.set):
                await granted.wait()
        except BaseException:  # also if cancelled
            self.release_unused()
            raise
        self._executions += 1
        self.start_execution()
        try:
            yield
        finally:
            self.finish_execution()
