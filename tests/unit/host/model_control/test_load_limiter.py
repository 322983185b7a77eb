"""How many loads run at once, and which waits are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from host.errors import HostError
from host.model_control.load_limiter import LoadLimiter
from tests.conftest import DEADLINE


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE))


async def turns() -> None:
    """Lets everything that can continue do so."""
    for _ in range(20):
        await asyncio.sleep(0)


class Load:
    """A load that holds a slot until told to end."""

    def __init__(self, slots: LoadLimiter) -> None:
        self._running = False
        self.end = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(slots))

    def is_running(self) -> bool:
        return self._running

    async def _run(self, slots: LoadLimiter) -> None:
        async with slots:
            self._running = True
            await self.end.wait()
        self._running = False


def test_no_more_than_the_given_number_run_and_all_get_their_turn() -> None:
    async def work() -> None:
        slots = LoadLimiter(2)
        loads = [Load(slots) for _ in range(5)]
        while any(not load.task.done() for load in loads):
            await turns()
            running = [load for load in loads if load.is_running()]
            assert 1 <= len(running) <= 2
            running[0].end.set()
            await turns()

    run(work())


def test_a_cancelled_load_does_not_take_a_turn_with_it() -> None:
    async def work() -> None:
        slots = LoadLimiter(1)
        first, second, third = (Load(slots) for _ in range(3))
        await turns()
        first.end.set()
        await asyncio.sleep(0)  # the second one has been woken, and is cancelled before it runs
        second.task.cancel()
        await turns()
        assert third.is_running()
        third.end.set()
        await third.task

    run(work())


def test_a_load_that_waits_for_another_one_does_not_count() -> None:
    async def work() -> None:
        slots = LoadLimiter(1)
        outer = Load(slots)
        await turns()
        with slots.lend_slot("outer", "inner"):
            inner, late = Load(slots), Load(slots)
            await turns()
            assert inner.is_running() and not late.is_running()
            inner.end.set()
            await inner.task
        outer.end.set()
        await turns()
        assert late.is_running()
        late.end.set()
        await late.task

    run(work())


def test_slots_are_not_overbooked_for_long_after_an_answer() -> None:
    async def work() -> None:
        slots = LoadLimiter(1)
        outer = Load(slots)
        await turns()
        with slots.lend_slot("outer", "inner"):
            inner = Load(slots)
            await turns()
        late = Load(slots)
        inner.end.set()
        await turns()
        assert not late.is_running(), "the outer load has its slot back"
        outer.end.set()
        await turns()
        assert late.is_running()
        late.end.set()
        await late.task

    run(work())


@pytest.mark.parametrize(
    ("waits", "last", "chain"),
    [
        ([], ("a", "a"), "a -> a"),
        ([("a", "b")], ("b", "a"), "b -> a -> b"),
        ([("a", "b"), ("b", "c")], ("c", "a"), "c -> a -> b -> c"),
        ([("a", "b"), ("a", "c"), ("c", "d")], ("d", "a"), "d -> a -> c -> d"),
    ],
)
def test_a_wait_that_closes_a_cycle_is_refused(
    waits: list[tuple[str, str]], last: tuple[str, str], chain: str
) -> None:
    slots = LoadLimiter(1)
    with ExitStack() as stack:
        for wait in waits:
            stack.enter_context(slots.lend_slot(*wait))
        with pytest.raises(HostError, match=f": {chain}\\. Load one"):
            stack.enter_context(slots.lend_slot(*last))
    with slots.lend_slot(*last) if last[0] != last[1] else ExitStack():
        pass  # a load that has ended closes no cycle


def test_waits_that_meet_are_no_cycle() -> None:
    slots = LoadLimiter(1)
    with ExitStack() as stack:
        for wait in (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "b")):
            stack.enter_context(slots.lend_slot(*wait))
