"""Busy-polling for messages that arrive soon, and waking stubs before their work is there."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from host.instances.busy_polling import BusyPoller, Doorbell
from stub.wire.ring import WAKE_EARLY
from tests.conftest import DEADLINE

QUICK, SLOW = 0.0001, 0.01
MAX_POLL_SECONDS = 0.0002


class Clock:
    """Each look at it takes a little."""

    def __init__(self) -> None:
        self.now = 1.0
        self.step = 1e-6
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        self.now += self.step
        return self.now


class Stub:
    """One that answers as soon as it is told to."""

    def __init__(self, busy_poller: BusyPoller, clock: Clock) -> None:
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.doorbell: Doorbell = busy_poller.doorbell(self.event, lambda: None)
        self._clock = clock

    def work(self, seconds: float = QUICK) -> None:
        self.doorbell.announce_frames()
        assert os.eventfd_read(self.event) % WAKE_EARLY == 1
        self._clock.now += seconds
        self.doorbell.stub_answered()

    def was_woken_early(self) -> bool:
        try:
            return os.eventfd_read(self.event) == WAKE_EARLY
        except BlockingIOError:
            return False


class Scene:
    """One client and two stubs."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.busy_poller = BusyPoller(self.clock)
        self.busy_poller.seconds = MAX_POLL_SECONDS
        self.stub, self.other = (Stub(self.busy_poller, self.clock) for _ in range(2))
        self.client: Callable[[], None] = self.busy_poller.connection_hook()

    def send_requests(self, times: int = 1, seconds: float = QUICK) -> None:
        for _ in range(times):
            self.client()
            self.stub.work(seconds)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    for stub in (made.stub, made.other):
        stub.doorbell.close()
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
def test_stub_is_woken_early_after_three_requests_of_the_same_client(scene: Scene) -> None:
    scene.send_requests(2)
    scene.client()
    assert not scene.stub.was_woken_early()
    scene.stub.work()
    scene.client()
    assert scene.stub.was_woken_early()
    assert not scene.other.was_woken_early()


@in_loop
def test_frame_count_is_distinguished_from_an_early_wake(scene: Scene) -> None:
    scene.send_requests(3)
    scene.client()
    scene.stub.doorbell.announce_frames()
    assert os.eventfd_read(scene.stub.event) == WAKE_EARLY + 1


@in_loop
def test_slow_stub_is_not_woken_early(scene: Scene) -> None:
    scene.send_requests(5, SLOW)
    scene.client()
    assert not scene.stub.was_woken_early()


@in_loop
def test_busy_stub_is_not_woken_early(scene: Scene) -> None:
    scene.send_requests(5)
    scene.client()
    assert scene.stub.was_woken_early()
    scene.stub.doorbell.announce_frames()
    assert os.eventfd_read(scene.stub.event) == 1
    scene.client()
    assert not scene.stub.was_woken_early()


@in_loop
def test_client_activity_without_a_request_wakes_the_stub_once(scene: Scene) -> None:
    scene.send_requests(3)
    scene.client()
    assert scene.stub.was_woken_early()
    for _ in range(5):
        scene.client()
        assert not scene.stub.was_woken_early()


@in_loop
def test_client_that_changes_its_model_needs_three_requests_again(scene: Scene) -> None:
    scene.send_requests(5)
    scene.client()
    assert scene.stub.was_woken_early()
    for _ in range(3):
        scene.other.work()
        scene.client()
        assert not scene.stub.was_woken_early()
    assert scene.other.was_woken_early()


@in_loop
def test_stub_whose_responses_lead_to_another_stub_wakes_it_early(scene: Scene) -> None:
    for _ in range(4):
        scene.client()
        scene.stub.work()
        scene.other.work()
    scene.client()
    scene.stub.was_woken_early()
    scene.stub.work()
    assert scene.other.was_woken_early()


@in_loop
def test_no_early_wake_while_several_requests_are_running(scene: Scene) -> None:
    second = scene.busy_poller.connection_hook()
    for _ in range(4):
        scene.send_requests()
        second()
        scene.other.work()
    scene.client()
    assert scene.stub.was_woken_early()
    scene.stub.doorbell.announce_frames()
    second()  # while the stub of the first model runs
    assert not scene.other.was_woken_early()


@in_loop
def test_exited_stub_is_neither_woken_nor_awaited(scene: Scene) -> None:
    scene.send_requests(5)
    scene.stub.doorbell.announce_frames()
    os.eventfd_read(scene.stub.event)
    scene.stub.doorbell.close()
    scene.client()
    assert not scene.stub.was_woken_early()
    scene.client = scene.busy_poller.connection_hook()
    for _ in range(3):
        scene.client()
        scene.other.work()
    scene.client()
    assert scene.other.was_woken_early()


@in_loop
def test_no_early_wake_when_busy_polling_is_off(scene: Scene) -> None:
    scene.busy_poller.seconds = 0.0
    scene.send_requests(5)
    scene.client()
    assert not scene.stub.was_woken_early()


def was_polled(scene: Scene) -> bool:
    """Whether the event loop polls for the stub's response before it sleeps."""
    polled = False

    async def main() -> None:
        nonlocal polled
        started = scene.clock.now
        scene.stub.doorbell.announce_frames()
        os.eventfd_read(scene.stub.event)
        before = scene.clock.reads
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        polled = scene.clock.reads > before
        scene.clock.step = 1e-6
        scene.clock.now = started  # however long that took, the stub has responded quickly
        scene.stub.doorbell.stub_answered()

    run(main())
    return polled


def test_no_polling_for_a_while_after_another_process_took_the_core(scene: Scene) -> None:
    run(warm_up(scene))
    assert was_polled(scene)
    scene.clock.step = 0.003  # a yield takes as long as the time slice of another process
    assert was_polled(scene)
    assert not any(was_polled(scene) for _ in range(200))


async def warm_up(scene: Scene) -> None:
    """The stub responds quickly, and so is polled for."""
    scene.stub.work()


# Staying awake


def clock_reads_during_poll(
    scene: Scene, act: Callable[[], None], before: Callable[[], None] = lambda: None
) -> int:
    """How often the clock is looked at in the turns of the loop after this."""
    reads = 0

    async def main() -> None:
        nonlocal reads
        scene.send_requests(2)
        before()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        act()
        reads = -scene.clock.reads
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reads += scene.clock.reads

    run(main())
    return reads


def test_host_busy_polls_for_a_quick_stub_up_to_the_limit(scene: Scene) -> None:
    assert clock_reads_during_poll(scene, scene.stub.doorbell.announce_frames) == pytest.approx(
        MAX_POLL_SECONDS / 1e-6, abs=3
    )


def test_host_does_not_busy_poll_for_a_slow_stub(scene: Scene) -> None:
    assert (
        clock_reads_during_poll(
            scene, scene.stub.doorbell.announce_frames, lambda: scene.send_requests(1, SLOW)
        )
        == 0
    )


def test_host_busy_polls_for_a_quick_client(scene: Scene) -> None:
    # Nothing is known of this stub yet: it is not waited for.
    assert clock_reads_during_poll(scene, scene.other.work) == pytest.approx(
        MAX_POLL_SECONDS / 1e-6, abs=3
    )


def test_host_does_not_busy_poll_for_a_slow_client(scene: Scene) -> None:
    def come_late() -> None:
        scene.clock.now += SLOW
        scene.client()

    assert clock_reads_during_poll(scene, scene.other.work, come_late) == 0


def test_busy_poll_ends_when_an_event_arrives(scene: Scene) -> None:
    read, write = os.pipe()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()

        def hear() -> None:
            os.read(read, 1)
            heard.set()

        loop.add_reader(read, hear)
        scene.send_requests(2)
        os.write(write, b"x")
        await asyncio.wait_for(heard.wait(), DEADLINE)  # the loop has told the kernel of the pipe
        loop.call_soon(os.write, write, b"x")  # just before the host reads
        scene.stub.doorbell.announce_frames()
        reads = scene.clock.reads
        await asyncio.sleep(0)
        assert scene.clock.reads == reads
        loop.remove_reader(read)

    try:
        run(main())
    finally:
        os.close(read)
        os.close(write)


def test_useless_busy_polls_are_suspended_for_a_while(scene: Scene) -> None:
    reads: list[int] = []

    def find_something(milliseconds: int) -> bool:
        reads.append(milliseconds)
        return True

    async def turns(count: int) -> int:
        for _ in range(count):
            scene.stub.work()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return len(reads)

    async def main() -> None:
        await turns(3)
        scene.busy_poller._poll = find_something
        assert await turns(20) == 4
        assert await turns(64) > 4

    run(main())


def test_only_uvloop_loops_busy_poll(scene: Scene) -> None:
    async def main() -> None:
        scene.send_requests(2)
        scene.stub.doorbell.announce_frames()
        before = scene.clock.reads
        await asyncio.sleep(0)
        assert scene.clock.reads == before

    asyncio.run(main())
