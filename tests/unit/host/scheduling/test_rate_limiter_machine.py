"""Compares the rate limiter under random events with a simple reference.

The rules are those of docs/reference/configuration-and-scheduling.md, "Rate limiter".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from host.errors import ErrorCode, HostError
from host.scheduling.rate_limiter import (
    Permit,
    RateLimiter,
    Resource,
    ResourceLimit,
    ResourceRequest,
)

Pool = tuple[str, int | None]

DEVICES = st.integers(0, 1)
NEEDS = st.lists(
    st.tuples(st.sampled_from("RRSG"), st.integers(1, 3)),
    max_size=2,
    unique_by=lambda pair: pair[0],
)
INSTANCE = st.tuples(NEEDS, DEVICES, st.integers(0, 3), st.integers(0, 9).map(lambda n: n == 9))
"""Resources, device, priority, and whether R is shared by all devices."""
PLENTY = [("R", 3, None), ("S", 3, None), ("G", 3, None)]
ALLOWANCES: st.SearchStrategy[list[tuple[str, int, int | None]]] = st.just([]) | st.lists(
    st.tuples(st.sampled_from("RRSG"), st.integers(1, 4), st.none() | DEVICES), max_size=3
).map(lambda more: PLENTY + more)
NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@dataclass(eq=False)
class Known:
    """An instance of the reference."""

    permit: Permit
    pools: dict[Pool, int]
    priority: int
    came: int = -1  # its position in the order of requests; -1 if it does not wait
    granted: bool = False
    running: int = 0
    executions: int = 0
    gone: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return self.executions * max(1, self.priority), self.came


class LimiterMachine(RuleBasedStateMachine):
    """Instances join, request, run and leave; `told` are the waiting ones that were granted."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = RateLimiter()
        self.allowed: list[tuple[str, int, int | None]] = []
        self.known: list[Known] = []
        self.asked = 0
        self.told: list[Known] = []
        self.expected: list[Known] = []

    # The reference

    def limit(self, pool: Pool) -> int:
        name, device = pool
        if not self.allowed:
            return max((k.pools.get(pool, 0) for k in self.known if not k.gone), default=0)
        of_name = [given for given in self.allowed if given[0] == name]
        entries = {given[2] for given in of_name}
        least = {entry: min(c for _, c, d in of_name if d == entry) for entry in entries}
        if device is None:
            return max(least.values(), default=0)
        return least.get(device, least.get(None, 0))

    def used(self, pool: Pool) -> int:
        return sum(k.pools.get(pool, 0) * (k.granted + k.running) for k in self.known)

    def fits(self, one: Known) -> bool:
        return all(self.used(p) + count <= self.limit(p) for p, count in one.pools.items())

    def settle(self) -> None:
        """Grants by lowest rank; only what needs nothing overtakes the first waiting instance."""
        for one in self.known:
            if one.came >= 0 and not one.pools:
                self.expect_grant(one)
        while waiting := [k for k in self.known if k.came >= 0]:
            first = min(waiting, key=lambda k: k.rank)
            if not self.fits(first):
                return
            self.expect_grant(first)

    def expect_grant(self, one: Known) -> None:
        one.came, one.granted = -1, True
        self.expected.append(one)

    def some(self, number: int, *states: bool) -> Known | None:
        """Draws an instance that is in this state."""
        found = [k for k, state in zip(self.known, states, strict=True) if state]
        return found[number % len(found)] if found else None

    # Events

    @initialize(allowed=ALLOWANCES, instances=st.lists(INSTANCE, min_size=2, max_size=5))
    def begin(
        self,
        allowed: list[tuple[str, int, int | None]],
        instances: list[tuple[list[tuple[str, int]], int, int, bool]],
    ) -> None:
        self.allowed = allowed
        self.limiter = RateLimiter([ResourceLimit(*given) for given in allowed])
        for instance in instances:
            self.load(*instance)

    @precondition(lambda self: sum(not k.gone for k in self.known) < 6)
    @rule(instance=INSTANCE)
    def is_loaded(self, instance: tuple[list[tuple[str, int]], int, int, bool]) -> None:
        self.load(*instance)

    def load(self, needs: list[tuple[str, int]], device: int, priority: int, mixed: bool) -> None:
        resources = [
            Resource(name, count, name == "G" or (mixed and name == "R")) for name, count in needs
        ]
        pools: dict[Pool, int] = {
            (r.name, None if r.shared else device): r.count for r in resources
        }
        one = Known(None, pools, priority)  # type: ignore[arg-type]  # it gets it below
        self.known.append(one)
        alive = {pool for k in self.known if not k.gone for pool in k.pools}
        clash = any((name, None) in alive for name, on in alive if on is not None)
        small = any(self.limit(pool) < count for pool, count in pools.items())
        try:
            one.permit = self.limiter.permit(ResourceRequest(resources, device, priority))
        except HostError as error:
            assert error.code is ErrorCode.INVALID_ARG and (clash or small)
            self.known.remove(one)
        else:
            assert not clash and not small
            self.settle()

    @rule(numbers=NUMBERS)
    def send_request(self, numbers: list[int]) -> None:
        for number in numbers:
            idle = [not (k.gone or k.granted or k.came >= 0) for k in self.known]
            one = self.some(number, *idle)
            if one is not None:
                one.came, self.asked = self.asked, self.asked + 1
                self.settle()
                at_once = one.permit.request_execution(partial(self.told.append, one))
                assert at_once == one.granted
                if at_once:
                    self.told.append(one)

    @precondition(lambda self: any(k.granted for k in self.known))
    @rule(numbers=NUMBERS)
    def begin_to_run(self, numbers: list[int]) -> None:
        for number in numbers:
            one = self.some(number, *(k.granted for k in self.known))
            if one is not None:
                self.start(one)

    def start(self, one: Known) -> None:
        one.permit.start_execution()
        one.granted = False
        one.running += 1
        one.executions += 1

    @precondition(lambda self: any(k.running for k in self.known))
    @rule(numbers=NUMBERS)
    def come_to_an_end(self, numbers: list[int]) -> None:
        for number in numbers:
            one = self.some(number, *(k.running > 0 for k in self.known))
            if one is not None:
                self.end(one)

    def end(self, one: Known) -> None:
        one.running -= 1
        self.settle()
        one.permit.finish_execution()

    @rule(number=st.integers(0, 9))
    def has_nothing_to_run(self, number: int) -> None:
        one = self.some(number, *(not k.gone and (k.granted or k.came >= 0) for k in self.known))
        if one is not None:
            self.give_back(one)

    def give_back(self, one: Known) -> None:
        one.granted, one.came = False, -1
        self.settle()
        one.permit.release_unused()

    @precondition(lambda self: any(k.came >= 0 for k in self.known))
    @rule(number=st.integers(0, 9))
    def overtakes(self, number: int) -> None:
        one = self.some(number, *(k.came >= 0 for k in self.known))
        assert one is not None
        fits = self.fits(one)
        if fits:
            self.expect_grant(one)
        assert one.permit.overtake() == fits

    @rule(number=st.integers(0, 9), dies=st.booleans())
    def goes(self, number: int, dies: bool) -> None:
        """Removes an instance; its executions may end before or after the removal."""
        one = self.some(number, *(not k.gone for k in self.known))
        if one is None:
            return
        while dies and one.running:
            self.end(one)
        one.granted, one.came = False, -1
        self.settle()
        one.gone = True
        one.permit.close()
        self.settle()

    # Invariants

    @invariant()
    def grants_are_those_of_the_reference_in_their_order(self) -> None:
        assert self.told == self.expected
        for one in self.known:
            assert (one.permit.granted, one.permit.running) == (one.granted, one.running)

    @invariant()
    def nothing_is_granted_that_is_not_there(self) -> None:
        for pool in {pool for k in self.known for pool in k.pools}:
            most = max(k.pools.get(pool, 0) for k in self.known)  # some may have been removed
            assert self.used(pool) <= (self.limit(pool) if self.allowed else most)

    def teardown(self) -> None:
        """Every waiting instance is granted in the end, and all resources are free again."""
        for _ in range(len(self.known)):
            for one in self.known:
                while one.granted or one.running:
                    if one.granted:
                        self.start(one)
                    self.end(one)
        assert not any(k.came >= 0 for k in self.known), "an instance starves"
        self.grants_are_those_of_the_reference_in_their_order()
        for one in self.known:
            if not one.gone:
                one.gone = True
                one.permit.close()
        for pool in {pool for k in self.known for pool in k.pools}:
            name, device = pool
            count = self.limit(pool) if self.allowed else 9
            need = ResourceRequest([Resource(name, count, device is None)], device or 0)
            permit = self.limiter.permit(need)
            assert permit.request_execution(lambda: None), f"{pool} has not returned"
            permit.close()


TestRateLimiter = LimiterMachine.TestCase
TestRateLimiter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
