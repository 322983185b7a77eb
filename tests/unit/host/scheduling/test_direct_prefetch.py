"""Calls that are prefetched by a fast instance of several, and reclaimed when it becomes slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from host.inference.call import Call
from host.scheduling.direct import _MAX_CHECKS, _RECLAIM_INTERVAL_NS, DirectScheduler
from host.scheduling.scheduler import InstanceSlot, Scheduler
from tests.unit.host.scheduling.fake_instances import TICK, Clock, FakeInstanceSlot, call_of

INTERVAL = _RECLAIM_INTERVAL_NS // TICK  # ticks between two checks


class FastSlot(FakeInstanceSlot):
    """Accepts `fast` prefetched calls; its stub has taken the first `taken` of them already."""

    def __init__(self, scheduler: Scheduler, batches: list[list[Call]], fast: int) -> None:
        super().__init__(scheduler, batches, fast)
        self.taken = 0
        self.steady = False  # accepts one while all are busy
        self.cores: list[bool] = []
        self._on_returned: Callable[[InstanceSlot, Call], None] | None = None

    def accepts_prefetch(self, call: Call, ahead: int) -> bool:
        return False  # the rule for a single instance is tested elsewhere

    def accepts_reclaimable(self, call: Call, prefetched: int, finds_core: bool) -> bool:
        self.cores.append(finds_core)
        assert prefetched == len(self.next)
        return prefetched < self.eager

    def accepts_one_reclaimable(self, call: Call) -> bool:
        assert not self.next
        return self.steady

    def run_reclaimable(
        self, call: Call, on_returned: Callable[[InstanceSlot, Call], None]
    ) -> None:
        assert self.running and not call.finished
        assert len(self.next) < max(self.eager, self.steady)
        self._on_returned = on_returned
        self.next.append([call])

    def reclaim_prefetched(self, most: int) -> Sequence[Call]:
        assert most >= len(self.next)
        calls: list[Call] = []
        while len(self.next) > self.taken:
            calls += self.next.pop()
        return calls[::-1]

    def return_prefetched(self) -> None:
        """Sets out to wait in `execute`, which needs the messages behind these calls."""
        while self.next:
            (call,) = self.next.popleft()
            assert self._on_returned is not None
            self._on_returned(self, call)


class Scene:
    def __init__(self, fast: int = 1, instances: int = 2, cpus: float = 16) -> None:
        self.clock = Clock()
        self.scheduler = DirectScheduler(self.clock, cpus)
        self.batches: list[list[Call]] = []
        self.instances = [FastSlot(self.scheduler, self.batches, fast) for _ in range(instances)]
        for instance in reversed(self.instances):  # the last one that was ready gets the next call
            self.scheduler.instance_ready(instance)

    def submit(self, count: int) -> list[Call]:
        calls = [call_of(now_ns=self.clock.now() + number) for number in range(count)]
        for call in calls:
            self.scheduler.submit(call)
        return calls


def test_fast_instance_prefetches_before_another_is_woken() -> None:
    scene = Scene(fast=2)
    first, second = scene.instances
    calls = scene.submit(7)
    assert (first.running, first.ahead) == (calls[:1], calls[1:3])
    assert (second.running, second.ahead) == (calls[3:4], calls[4:6])
    assert scene.scheduler.queued == 5
    second.finish()
    second.finish()
    assert (second.running, second.ahead) == (calls[5:6], calls[6:])


def test_call_goes_to_the_instance_that_was_used_last() -> None:
    scene = Scene(fast=0)
    first, second = scene.instances
    for _ in range(3):
        scene.submit(1)
        first.finish()
    assert (len(first.batches), second.running) == (3, [])


def test_an_instance_knows_whether_another_would_find_a_core() -> None:
    scene = Scene(fast=1, instances=3, cpus=3)  # one for the server, two for instances
    scene.submit(5)
    first, second, third = scene.instances
    assert first.cores == [True, True]
    assert second.cores == [False, False]
    assert third.running


def test_a_call_behind_a_slow_one_is_reclaimed_for_an_idle_instance() -> None:
    scene = Scene(fast=3)
    first, second = scene.instances
    calls = scene.submit(4)
    assert first.ahead == calls[1:]
    scene.clock.advance(2 * INTERVAL)
    assert (first.running, first.ahead) == (calls[:1], [])
    assert second.running == calls[1:2]
    second.finish()
    second.finish()
    second.finish()
    assert second.batches == [[call] for call in calls]  # in their order


def test_calls_of_an_instance_that_makes_progress_are_not_reclaimed() -> None:
    scene = Scene(fast=8)
    first, second = scene.instances
    calls = scene.submit(8)
    for number in range(7):
        scene.clock.advance(INTERVAL)
        assert first.running == [calls[number]]
        first.finish()
    first.finish()
    assert second.running == []
    scene.clock.advance(2 * INTERVAL)
    assert scene.clock.armed == 0


def test_call_that_the_stub_was_taking_is_reclaimed_at_the_next_check() -> None:
    scene = Scene(fast=1)
    first, second = scene.instances
    calls = scene.submit(2)
    first.taken = 1
    scene.clock.advance(2 * INTERVAL)
    assert second.running == []
    first.taken = 0
    scene.clock.advance(INTERVAL)
    assert second.running == calls[1:]


def test_returned_call_runs_on_an_idle_instance_at_once() -> None:
    scene = Scene(fast=1)
    first, second = scene.instances
    calls = scene.submit(2)
    first.return_prefetched()
    assert second.running == calls[1:]
    assert calls[1].holder is second


def test_prefetched_calls_of_a_leaving_instance_run_on_the_others() -> None:
    scene = Scene(fast=1)
    first, second = scene.instances
    calls = scene.submit(2)
    first.leave()
    assert second.running == calls[1:]


def saturated_scene() -> tuple[Scene, list[Call]]:
    """Two instances that are not fast; each runs a call, and the first has the next one."""
    scene = Scene(fast=0)
    first, second = scene.instances
    first.steady = second.steady = True
    calls = scene.submit(6)
    assert (first.ahead, second.ahead) == ([], [])  # one of them ends first, and it is not known
    first.finish()
    assert (first.running, first.ahead) == (calls[2:3], calls[3:4])
    return scene, calls


def test_instances_of_a_long_queue_get_the_call_after_the_next_one() -> None:
    scene, calls = saturated_scene()
    first, second = scene.instances
    second.finish()
    assert (second.running, second.ahead) == (calls[4:5], [])  # the queue is short
    first.finish()
    assert (first.running, first.ahead) == (calls[3:4], [])


def test_call_behind_a_slow_one_is_reclaimed_though_no_instance_is_idle() -> None:
    scene, calls = saturated_scene()
    first, second = scene.instances
    scene.clock.advance(_MAX_CHECKS * INTERVAL)
    assert first.ahead == calls[3:4]
    scene.clock.advance(INTERVAL)
    assert first.ahead == []
    second.finish()
    assert second.running == calls[3:4]


def test_call_behind_another_is_reclaimed_when_an_instance_is_idle() -> None:
    scene, calls = saturated_scene()
    first, second = scene.instances
    for _ in range(3):
        second.finish()
    assert (first.ahead, second.running) == (calls[3:4], [])
    scene.clock.advance(2 * INTERVAL)
    assert second.running == calls[3:4]


class PrefetchMachine(RuleBasedStateMachine):
    """Random events with one to three instances, some of which prefetch."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(early=1)
        self.scheduler = DirectScheduler(self.clock, 3)
        self.batches: list[list[Call]] = []
        self.calls: list[Call] = []
        self.instances: list[FastSlot] = []

    @initialize(fast=st.lists(st.integers(0, 3), min_size=2, max_size=3))
    def begin(self, fast: list[int]) -> None:
        for number in fast:
            self.instance_joins(number)

    @precondition(lambda self: len(self.instances) < 3)
    @rule(fast=st.integers(0, 3))
    def instance_joins(self, fast: int) -> None:
        instance = FastSlot(self.scheduler, self.batches, fast)
        instance.steady = True
        self.instances.append(instance)
        self.scheduler.instance_ready(instance)

    @rule(count=st.integers(1, 4))
    def requests_come(self, count: int) -> None:
        for _ in range(count):
            call = call_of(now_ns=len(self.calls))
            self.calls.append(call)
            self.scheduler.submit(call)

    @precondition(lambda self: self.instances)
    @rule(data=st.data(), what=st.sampled_from(["finish", "finish", "return", "die", "take"]))
    def instance_acts(self, data: st.DataObject, what: str) -> None:
        instance = data.draw(st.sampled_from(self.instances))
        if what == "die":
            self.instances.remove(instance)
            instance.die()
        elif what == "return":
            instance.return_prefetched()
        elif what == "take":
            instance.taken = 1
        elif instance.running:
            instance.taken = 0
            instance.finish()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.calls)).cancel()

    @rule()
    def time_passes(self) -> None:
        self.clock.advance(3 * INTERVAL)
        if any(not instance.running for instance in self.instances) and len(self.instances) > 1:
            stuck = [call for one in self.instances for call in one.ahead[one.taken :]]
            assert not stuck, "waits behind a slow call while an instance is idle"

    @invariant()
    def each_call_is_in_one_place(self) -> None:
        ran = [call for batch in self.batches for call in batch]
        assert len(ran) == len(set(map(id, ran))), "a call ran twice"
        running = [call for one in self.instances for call in one.running]
        ahead = [call for one in self.instances for call in one.ahead]
        waiting = [*self.scheduler._queue, *(call for call in ahead if not call.finished)]
        for call in self.calls:
            assert call.finished or (call in running) + (call in waiting) == 1
        assert self.scheduler.queued == len(waiting)

    @invariant()
    def no_call_is_queued_while_an_instance_is_idle(self) -> None:
        if any(not instance.running for instance in self.instances):
            assert not self.scheduler._queue


TestPrefetch = PrefetchMachine.TestCase
TestPrefetch.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
