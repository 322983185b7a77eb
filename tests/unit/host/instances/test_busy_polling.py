"""Staying awake for what comes at once, and waking stubs up before their work is there."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from host.instances.busy_polling import Attention, Bell
from stub.wire.ring import ROUSE
from tests.conftest import DEADLINE

QUICK, SLOW = 0.0001, 0.01
AWAKE = 0.0002


class Clock:
    """Each look at it takes a little."""

    def __init__(self) -> None:
        self.now = 1.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        self.now += 1e-6
        return self.now


class Stub:
    """One that answers as soon as it is told to."""

    def __init__(self, attention: Attention, clock: Clock) -> None:
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.bell: Bell = attention.bell(self.event)
        self._clock = clock

    def work(self, seconds: float = QUICK) -> None:
        self.bell.announce()
        assert os.eventfd_read(self.event) % ROUSE == 1
        self._clock.now += seconds
        self.bell.answered()

    def roused(self) -> bool:
        try:
            return os.eventfd_read(self.event) == ROUSE
        except BlockingIOError:
            return False


class Scene:
    """One client and two stubs."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.attention = Attention(self.clock)
        self.attention.seconds = AWAKE
        self.stub, self.other = (Stub(self.attention, self.clock) for _ in range(2))
        self.client: Callable[[], None] = self.attention.source()

    def ask(self, times: int = 1, seconds: float = QUICK) -> None:
        for _ in range(times):
            self.client()
            self.stub.work(seconds)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    for stub in (made.stub, made.other):
        stub.bell.close()
        os.close(stub.event)


def run(main: Coroutine[Any, Any, None]) -> None:
    """As a host's program does it."""
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def in_loop(test: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """A test of what happens in one turn of a loop."""

    @functools.wraps(test)
    def within(scene: Scene) -> None:
        async def main() -> None:
            test(scene)

        run(main())

    return within


@in_loop
def test_a_stub_is_roused_when_a_client_speaks_that_led_to_it_three_times(scene: Scene) -> None:
    scene.ask(2)
    scene.client()
    assert not scene.stub.roused()
    scene.stub.work()
    scene.client()
    assert scene.stub.roused()
    assert not scene.other.roused()


@in_loop
def test_frames_are_told_apart_from_rousing(scene: Scene) -> None:
    scene.ask(3)
    scene.client()
    scene.stub.bell.announce()
    assert os.eventfd_read(scene.stub.event) == ROUSE + 1


@in_loop
def test_a_slow_stub_is_not_roused(scene: Scene) -> None:
    scene.ask(5, SLOW)
    scene.client()
    assert not scene.stub.roused()


@in_loop
def test_a_stub_at_work_is_not_roused(scene: Scene) -> None:
    scene.ask(5)
    scene.client()
    assert scene.stub.roused()
    scene.stub.bell.announce()
    assert os.eventfd_read(scene.stub.event) == 1
    scene.client()
    assert not scene.stub.roused()


@in_loop
def test_a_client_that_speaks_of_something_else_rouses_once(scene: Scene) -> None:
    scene.ask(3)
    scene.client()
    assert scene.stub.roused()
    for _ in range(5):
        scene.client()
        assert not scene.stub.roused()


@in_loop
def test_a_client_that_asks_another_model_has_to_get_used_to_it(scene: Scene) -> None:
    scene.ask(5)
    scene.client()
    assert scene.stub.roused()
    for _ in range(3):
        scene.other.work()
        scene.client()
        assert not scene.stub.roused()
    assert scene.other.roused()


@in_loop
def test_a_stub_that_leads_to_another_one_rouses_it(scene: Scene) -> None:
    for _ in range(4):
        scene.client()
        scene.stub.work()
        scene.other.work()
    scene.client()
    scene.stub.roused()
    scene.stub.work()
    assert scene.other.roused()


@in_loop
def test_nobody_is_roused_while_several_requests_are_under_way(scene: Scene) -> None:
    second = scene.attention.source()
    for _ in range(4):
        scene.ask()
        second()
        scene.other.work()
    scene.client()
    assert scene.stub.roused()
    scene.stub.bell.announce()
    second()  # while the first one's stub is at work
    assert not scene.other.roused()


@in_loop
def test_a_stub_that_has_gone_is_not_roused_and_not_awaited(scene: Scene) -> None:
    scene.ask(5)
    scene.stub.bell.announce()
    os.eventfd_read(scene.stub.event)
    scene.stub.bell.close()
    scene.client()
    assert not scene.stub.roused()
    scene.client = scene.attention.source()
    for _ in range(3):
        scene.client()
        scene.other.work()
    scene.client()
    assert scene.other.roused()


@in_loop
def test_nobody_is_roused_unless_the_host_may_stay_awake(scene: Scene) -> None:
    scene.attention.seconds = 0.0
    scene.ask(5)
    scene.client()
    assert not scene.stub.roused()


# Telling of work


def told_of(scene: Scene) -> int:
    try:
        return os.eventfd_read(scene.stub.event)
    except BlockingIOError:
        return 0


def test_a_stub_that_is_busy_is_told_of_more_work_once_all_is_read(scene: Scene) -> None:
    async def main() -> None:
        scene.stub.bell.announce()
        assert told_of(scene) == 1
        for _ in range(3):
            scene.stub.bell.announce()
        assert told_of(scene) == 0
        await asyncio.sleep(0)
        assert told_of(scene) == 3
        await asyncio.sleep(0)
        assert told_of(scene) == 0

    run(main())


def test_a_busy_stub_is_told_of_sixteen_frames_at_once(scene: Scene) -> None:
    async def main() -> None:
        for _ in range(1 + 16 + 2):
            scene.stub.bell.announce()
        assert told_of(scene) == 1 + 16
        await asyncio.sleep(0)
        assert told_of(scene) == 2

    run(main())


def test_a_stub_that_has_answered_is_told_of_all_its_work(scene: Scene) -> None:
    async def main() -> None:
        for _ in range(3):
            scene.stub.bell.announce()
        scene.stub.bell.answered()
        scene.stub.bell.announce()
        assert told_of(scene) == 4
        await asyncio.sleep(0)
        assert told_of(scene) == 0

    run(main())


def test_a_stub_that_has_gone_is_told_nothing(scene: Scene) -> None:
    async def main() -> None:
        for _ in range(3):
            scene.stub.bell.announce()
        assert told_of(scene) == 1
        scene.stub.bell.close()
        await asyncio.sleep(0)
        assert told_of(scene) == 0

    run(main())


# Staying awake


def looks_of(scene: Scene, act: Callable[[], None], before: Callable[[], None] = list) -> int:
    """How often the clock is looked at in the turns of the loop after this."""
    looks = 0

    async def main() -> None:
        nonlocal looks
        scene.ask(2)
        before()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        act()
        looks = -scene.clock.looks
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        looks += scene.clock.looks

    run(main())
    return looks


def test_the_host_waits_awake_for_a_quick_stub_as_long_as_it_is_told(scene: Scene) -> None:
    assert looks_of(scene, scene.stub.bell.announce) == pytest.approx(AWAKE / 1e-6, abs=3)


def test_it_does_not_for_a_slow_one(scene: Scene) -> None:
    assert looks_of(scene, scene.stub.bell.announce, lambda: scene.ask(1, SLOW)) == 0


def test_it_waits_awake_for_a_client_that_asks_at_once(scene: Scene) -> None:
    # Nothing is known of this stub yet: it is not waited for.
    assert looks_of(scene, scene.other.work) == pytest.approx(AWAKE / 1e-6, abs=3)


def test_it_does_not_for_one_that_takes_its_time(scene: Scene) -> None:
    def come_late() -> None:
        scene.clock.now += SLOW
        scene.client()

    assert looks_of(scene, scene.other.work, come_late) == 0


def test_it_wakes_up_as_soon_as_there_is_something_to_do(scene: Scene) -> None:
    read, write = os.pipe()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        loop.add_reader(read, lambda: (os.read(read, 1), heard.set()))
        scene.ask(2)
        os.write(write, b"x")
        await asyncio.wait_for(heard.wait(), DEADLINE)  # the loop has told the kernel of the pipe
        loop.call_soon(os.write, write, b"x")  # just before the host looks
        scene.stub.bell.announce()
        looks = scene.clock.looks
        await asyncio.sleep(0)
        assert scene.clock.looks == looks
        loop.remove_reader(read)

    try:
        run(main())
    finally:
        os.close(read)
        os.close(write)


def test_it_stops_looking_for_a_while_if_there_is_always_something_to_do(scene: Scene) -> None:
    looks: list[int] = []

    def find_something(milliseconds: int) -> bool:
        looks.append(milliseconds)
        return True

    async def turns(count: int) -> int:
        for _ in range(count):
            scene.stub.work()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return len(looks)

    async def main() -> None:
        await turns(3)
        scene.attention._poll = find_something
        assert await turns(20) == 4
        assert await turns(64) > 4

    run(main())


def test_a_loop_that_is_not_uvloops_sleeps(scene: Scene) -> None:
    async def main() -> None:
        scene.ask(2)
        scene.stub.bell.announce()
        before = scene.clock.looks
        await asyncio.sleep(0)
        assert scene.clock.looks == before

    asyncio.run(main())
