"""Executions that need resources: who may run when there are not enough for all (spec 7.1)."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from host.errors import HostError, invalid_argument
from host.inference.request import CallHolder

_Pool = tuple[str, int | None]
"""A resource, and the device that it belongs to; None: one for all devices."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What one execution takes of it; `shared` by all devices, or one of each."""

    name: str
    count: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What the executions of one instance need; of `priority` 2, half as many as of 1."""

    resources: Sequence[Resource] = ()
    device: int = 0
    priority: int = 1

    @property
    def pools(self) -> Iterator[tuple[_Pool, int]]:
        """How much of which pool."""
        for resource in self.resources:
            yield (resource.name, None if resource.shared else self.device), resource.count


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """How much of a resource there is, on one device or (None) on every one."""

    name: str
    count: int
    device: int | None = None


class RateLimiter:
    """Gives resources to one execution after the other: those of the lowest rank first.

    Nobody overtakes the first one, even if there is enough for others. Without `allowances`, there
    is as much of everything as the most demanding instance needs; with some, no more than they
    say. Belongs to the event loop.
    """

    def __init__(self, allowances: Iterable[ResourceLimit] = ()) -> None:
        self._allowed: dict[_Pool, int] = {}
        for given in allowances:
            key = given.name, given.device
            self._allowed[key] = min(given.count, self._allowed.get(key, given.count))
        self._permits: dict[Permit, None] = {}
        self._limits: dict[_Pool, int] = {}
        self._used: Counter[_Pool] = Counter()
        self._staged: dict[Permit, int] = {}  # and who came first
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
        self._grant_waiting()  # others may have got more room by this one's needs
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
        """The owners of all executions one of which has to end before this permit is granted.

        None if it need not wait for any, or if somebody holds resources who waits for nothing.
        """
        waiting = (
            [permit, min(self._staged, key=self._insert_waiting)] if self._staged else [permit]
        )
        lacking = {
            pool
            for other in waiting
            for pool, count in other.need.pools
            if self._used[pool] + count > self._limits[pool]
        }
        found = [
            other
            for other in self._permits
            if other.active and any(pool in lacking for pool, _ in other.need.pools)
        ]
        owners = [other.owner for other in found if other.running and other.owner is not None]
        return owners if len(owners) == len(found) else []

    def _insert_waiting(self, permit: Permit) -> tuple[int, int]:
        return permit.rank, self._staged[permit]

    def _remove_permit(self, permit: Permit) -> None:
        if self._permits.pop(permit, self) is None:
            self._limits = self._compute_limits()

    def _reserve(self, permit: Permit) -> None:
        self._staged[permit] = next(self._numbers)
        self._grant_waiting()

    def _unreserve(self, permit: Permit) -> None:
        if self._staged.pop(permit, None) is not None:
            self._grant_waiting()  # it may have been the one that the others waited for

    def _return_resources(self, permit: Permit) -> None:
        self._used.subtract(dict(permit.need.pools))
        self._grant_waiting()

    def _grant_waiting(self) -> None:
        """Grant what can be granted."""
        while self._staged:
            first = min(self._staged, key=self._insert_waiting)
            pools = dict(first.need.pools)
            if any(self._used[pool] + pools[pool] > self._limits[pool] for pool in pools):
                return
            self._used.update(pools)
            del self._staged[first]
            first.grant()


class Permit:
    """One instance's permission to run a batch: asked for, granted, used, given back."""

    def __init__(self, limiter: RateLimiter, need: ResourceRequest) -> None:
        self.need = need
        self.granted = False
        """Whether resources are set aside for its next execution."""
        self.running = 0
        """How many of its executions have not ended."""
        self.owner: CallHolder | None = None
        """What runs when it is granted, for whoever looks for circles."""
        self._executions = 0
        self._limiter = limiter
        self._told: Callable[[], None] | None = None
        self._asking = False

    @property
    def rank(self) -> int:
        """Lower ones go first: executions so far, which count for more at a low priority."""
        return self._executions * max(1, self.need.priority)

    @property
    def active(self) -> bool:
        """Whether it has resources."""
        return self.granted or self.running > 0

    @property
    def holders(self) -> list[CallHolder]:
        """The owners of the executions that it waits for, or would have to wait for."""
        return self._limiter.holders(self)

    def request_execution(self, granted: Callable[[], None]) -> bool:
        """Whether the next execution may start now; if not, `granted` is called when it may."""
        if not self.granted and self._told is None:
            self._told = granted
            self._asking = True
            self._limiter._reserve(self)
            self._asking = False
        return self.granted

    def grant(self) -> None:
        """Resources have been set aside."""
        self.granted = True
        told, self._told = self._told, None
        if told is not None and not self._asking:
            told()

    def start_execution(self) -> None:
        """The execution that they were set aside for begins."""
        self.granted = False
        self.running += 1
        self._executions += 1

    def finish_execution(self) -> None:
        """An execution has ended: its resources are there for others."""
        self.running -= 1
        self._limiter._return_resources(self)

    def release_unused(self) -> None:
        """There will be no execution for now."""
        self._told = None
        if self.granted:
            self.granted = False
            self._limiter._return_resources(self)
        else:
            self._limiter._unreserve(self)

    def close(self) -> None:
        """The instance has gone, and its needs with it."""
        self.release_unused()
        self._limiter._remove_permit(self)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Holds the resources for work that comes from no scheduler: loading and warming up."""
        granted = asyncio.Event()
        try:
            if not self.request_execution(granted.set):
                await granted.wait()
            yield
        finally:
            self.release_unused()
