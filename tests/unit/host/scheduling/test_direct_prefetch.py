"""Calls that are prefetched by a fast instance of several, and reclaimed when it becomes slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from host.errors import ErrorCode, HostError, unavailable
from host.inference.call import Call, CallState
from host.scheduling.direct import _OVERDUE_NS, _RECLAIM_INTERVAL_NS, DirectScheduler
from host.scheduling.scheduler import InstanceSlot, Scheduler
from tests.unit.host.scheduling.fake_instances import (
    TICK,
    Clock,
    FakeInstanceSlot,
    call_of,
    error_of,
)

INTERVAL = _RECLAIM_INTERVAL_NS // TICK  # ticks between two checks
OVERDUE = _OVERDUE_NS // TICK


class FastSlot(FakeInstanceSlot):
    """Accepts `fast` prefetched calls; its stub has taken the first `taken` of them already.

    With `takes_next`, it also accepts its next call while all instances are busy.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        batches: list[list[Call]],
        fast: int,
        takes_next: bool = False,
    ) -> None:
        super().__init__(scheduler, batches, fast)
        self.takes_next = takes_next
        self.taken = 0
        self.asked = 0  # whether it accepts its next call
        self.cores: list[bool] = []
        self._on_returned: Callable[[InstanceSlot, Call], None] | None = None

    def accepts_prefetch(self, call: Call, prefetched: int) -> bool:
        return False  # the rule for a single instance is tested elsewhere

    def accepts_reclaimable(self, call: Call, prefetched: int, finds_core: bool) -> bool:
        self.cores.append(finds_core)
        assert prefetched == len(self.next)
        return prefetched < self.eager

    def accepts_next(self, call: Call) -> bool:
        assert self.running and not self.next, "has its next call already"
        self.asked += 1
        return self.takes_next

    def run_prefetched(
        self, call: Call, on_returned: Callable[[InstanceSlot, Call], None] | None
    ) -> None:
        assert self.running and not call.finished
        assert len(self.next) < max(self.eager, self.takes_next)
        self._on_returned = on_returned
        self.next.append([call])

    def run(self, calls: Sequence[Call]) -> None:
        assert all(call.state is CallState.RUNNING for call in calls), "runs a cancelled call"
        super().run(calls)

    def reclaim_prefetched(self, most: int) -> Sequence[Call]:
        assert most >= len(self.next)
        calls: list[Call] = []
        while len(self.next) > self.taken:
            calls += self.next.pop()
        return calls[::-1]

    def return_prefetched(self) -> None:
        """Sets out to wait in `execute`, which needs the messages behind these calls."""
        while self.next:
            self.return_next()

    def return_next(self) -> None:
        (call,) = self.next.popleft()
        assert self._on_returned is not None
        self._on_returned(self, call)


class Unsendable(FastSlot):
    """Cannot send calls of the kind "unsendable"."""

    def run_prefetched(
        self, call: Call, on_returned: Callable[[InstanceSlot, Call], None] | None
    ) -> None:
        if call.request.id == "unsendable":
            call.fail(unavailable("it cannot be sent"))
        else:
            super().run_prefetched(call, on_returned)


class Scene:
    def __init__(
        self,
        fast: int = 1,
        instances: int = 2,
        cpus: float = 16,
        slot: type[FastSlot] = FastSlot,
        takes_next: bool = False,
    ) -> None:
        self.clock = Clock()
        self.scheduler = DirectScheduler(self.clock, cpus)
        self.batches: list[list[Call]] = []
        self.instances = [
            slot(self.scheduler, self.batches, fast, takes_next) for _ in range(instances)
        ]
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
    for _ in range(8):
        calls = scene.submit(2)
        scene.clock.advance(INTERVAL)
        assert (first.running, first.ahead) == (calls[:1], calls[1:])
        first.finish()
        first.finish()
    assert second.batches is first.batches and len(first.batches) == 16
    assert second.running == []
    scene.clock.advance(2 * INTERVAL)
    assert scene.clock.armed == 0


def test_last_calls_behind_a_slow_instance_that_makes_progress_are_reclaimed() -> None:
    scene = Scene(fast=10)
    first, second = scene.instances
    calls = scene.submit(11)
    scene.clock.advance(INTERVAL)
    first.finish()
    assert (first.running, first.ahead) == (calls[1:2], calls[2:])
    scene.clock.advance(INTERVAL)
    assert second.running == calls[2:3]
    assert first.ahead == []


def test_calls_of_an_instance_that_makes_progress_stay_while_no_other_is_idle() -> None:
    scene = Scene(fast=4)
    first, second = scene.instances
    calls = scene.submit(6)
    assert second.running == calls[5:]
    for number in range(1, 5):
        scene.clock.advance(INTERVAL)
        first.finish()
        assert (first.running, first.ahead) == (calls[number : number + 1], calls[number + 1 : 5])


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


def test_calls_that_come_back_run_in_the_order_in_which_they_arrived() -> None:
    scene = Scene(fast=2)
    first, second = scene.instances
    calls = scene.submit(7)
    assert (first.ahead, second.ahead) == (calls[1:3], calls[4:6])
    second.return_prefetched()
    first.return_next()
    first.return_next()
    assert list(scene.scheduler._queue) == [*calls[1:3], *calls[4:]]
    first.finish()
    assert first.running == calls[1:2]


@pytest.mark.parametrize("how", ["returned", "left", "died", "reclaimed"])
def test_cancelled_call_that_comes_back_ends(how: str) -> None:
    scene = Scene(fast=1)
    first, second = scene.instances
    calls = scene.submit(2)
    calls[1].request_cancellation(HostError(ErrorCode.CANCELLED, "gone"))
    assert calls[1].state is CallState.CANCELLING
    if how == "returned":
        first.return_prefetched()
    elif how == "left":
        first.leave()
    elif how == "died":
        first.die()
    else:
        scene.clock.advance(2 * INTERVAL)
    assert second.running == []
    error = error_of(calls[1])
    assert error is not None and error.message == "gone" and calls[1].cancelled
    assert first.cancelled == calls[1:]


@pytest.mark.parametrize("recovers", [False, True])
def test_call_that_a_leaving_instance_returns_fails_if_no_other_will_come(recovers: bool) -> None:
    scene = Scene(fast=1)
    first, second = scene.instances
    calls = scene.submit(2)
    first.taken = 1
    second.leave()
    first.leave()
    scene.scheduler.may_recover = lambda: recovers
    first.return_prefetched()
    assert calls[1].finished != recovers
    if not recovers:
        error = error_of(calls[1])
        assert error is not None and error.code is ErrorCode.UNAVAILABLE
        assert "no other is left" in error.message


def test_an_instance_whose_partner_restarts_gets_no_call_that_it_cannot_return() -> None:
    class Willing(FastSlot):
        def accepts_prefetch(self, call: Call, prefetched: int) -> bool:
            return FakeInstanceSlot.accepts_prefetch(self, call, prefetched)

    scene = Scene(fast=1, slot=Willing)
    first, second = scene.instances
    scene.submit(4)
    for instance in scene.instances:
        instance.eager = 4
    restarting = False
    scene.scheduler.may_recover = lambda: restarting
    dead, other = (first, second) if scene.scheduler._recent is second else (second, first)
    dead.die()
    restarting = True  # as a supervisor: it is removed first
    ahead = list(other.ahead)
    scene.submit(3)
    assert other.running and other.ahead == ahead


def test_prefetched_call_that_cannot_be_sent_is_not_the_one_that_starts_next() -> None:
    scene = Scene(fast=3, slot=Unsendable)
    first, second = scene.instances
    (running,) = scene.submit(1)
    scene.scheduler.submit(call_of(kind="unsendable"))
    (behind,) = scene.submit(1)
    assert first.ahead == [behind] and scene.scheduler.queued == 1
    scene.clock.advance(2 * INTERVAL)
    assert (first.running, second.running) == ([running], [behind])
    assert behind.holder is second


def test_a_queued_call_that_cannot_be_sent_in_advance_has_left_the_queue_when_it_fails() -> None:
    scene = Scene(fast=1, slot=Unsendable)
    scene.submit(4)
    unsendable = call_of(kind="unsendable", now_ns=scene.clock.now() + 4)
    queued: list[int] = []

    def unload(response: object, final: bool) -> None:
        queued.append(scene.scheduler.queued)
        scene.scheduler.fail_queued(unavailable("the model is unloaded"))

    unsendable.subscribe(unload)
    scene.scheduler.submit(unsendable)
    (behind,) = scene.submit(1)
    scene.instances[1].finish()
    assert queued == [2]  # the one in advance of the other instance, and the one behind
    assert unsendable.failed and behind.failed


def test_prefetched_calls_of_a_leaving_instance_run_on_the_others() -> None:
    scene = Scene(fast=1)
    first, second = scene.instances
    calls = scene.submit(2)
    first.leave()
    assert second.running == calls[1:]


def test_each_busy_instance_gets_its_next_call_while_all_are_busy() -> None:
    scene = Scene(fast=0, takes_next=True)
    first, second = scene.instances
    calls = scene.submit(5)
    assert (first.running, second.running) == (calls[:1], calls[1:2])
    assert (first.ahead, second.ahead) == (calls[2:3], calls[3:4])  # first the one to end first
    assert scene.scheduler.queued == 3
    second.finish()
    assert (second.running, second.ahead) == (calls[3:4], calls[4:])


def test_instance_that_becomes_idle_takes_the_oldest_call_behind_another() -> None:
    scene = Scene(fast=0, instances=3, takes_next=True)
    first, second, third = scene.instances
    calls = scene.submit(5)
    assert (first.ahead, second.ahead, third.ahead) == (calls[3:4], calls[4:], [])
    third.finish()
    assert (first.ahead, second.ahead, third.running) == ([], calls[4:], calls[3:4])
    third.finish()
    assert (second.ahead, third.running) == ([], calls[4:])


def test_instance_that_becomes_idle_takes_no_call_that_another_is_taking() -> None:
    scene = Scene(fast=0, instances=3, takes_next=True)
    first, second, third = scene.instances
    calls = scene.submit(5)
    first.taken = 1
    third.finish()
    assert (first.ahead, third.running) == (calls[3:4], calls[4:])


def test_overdue_next_call_runs_before_younger_ones() -> None:
    scene = Scene(fast=0, takes_next=True)
    first, second = scene.instances
    calls = scene.submit(6)
    for number in (3, 4):
        scene.clock.advance((OVERDUE - INTERVAL) // 2)
        second.finish()
        assert (second.running, second.ahead) == (calls[number:][:1], calls[number + 1 :][:1])
    assert first.ahead == calls[2:3]
    scene.clock.advance(INTERVAL)
    assert first.ahead == []  # and it gets none before it has started another one
    second.finish()
    assert (second.running, second.ahead) == (calls[5:], [])  # it is given in advance only once
    first.finish()
    assert first.running == calls[2:3]


def test_returned_next_call_stays_in_the_queue_until_an_instance_can_start_it() -> None:
    scene = Scene(fast=0, takes_next=True)
    first, second = scene.instances
    calls = scene.submit(4)
    first.return_prefetched()
    assert first.ahead == [] and scene.scheduler.queued == 2
    second.finish()
    assert (second.running, second.ahead) == (calls[3:], [])
    second.finish()
    assert second.running == calls[2:3]
    scene.clock.advance(1)
    (younger,) = scene.submit(1)
    assert second.ahead == [younger]


@pytest.mark.parametrize("how", ["finished", "cancelled"])
def test_instance_that_becomes_idle_takes_the_next_call_behind_an_ended_one(how: str) -> None:
    scene = Scene(fast=0, instances=3, takes_next=True)
    first, second, third = scene.instances
    calls = scene.submit(5)
    assert (first.ahead, second.ahead) == (calls[3:4], calls[4:])
    if how == "finished":
        calls[3].fail(unavailable("it has failed"))
    else:
        calls[3].request_cancellation(HostError(ErrorCode.CANCELLED, "gone"))
    third.finish()
    assert calls[3].finished and third.running == calls[4:]
    assert second.ahead == []


def test_instance_that_refuses_its_next_call_leaves_it_to_another() -> None:
    scene = Scene(fast=0, takes_next=True)
    first, second = scene.instances
    first.takes_next = False
    calls = scene.submit(4)
    assert (first.ahead, second.ahead) == ([], calls[2:3])
    assert first.asked == 1  # and not again before it has started another one
    first.takes_next = True
    first.finish()
    assert (first.running, first.ahead) == (calls[3:], [])
    (after,) = scene.submit(1)
    assert first.ahead == [after]


def test_next_call_has_left_the_queue_before_it_is_given() -> None:
    class Watching(FastSlot):
        def run_prefetched(
            self, call: Call, on_returned: Callable[[InstanceSlot, Call], None] | None
        ) -> None:
            assert isinstance(self.scheduler, DirectScheduler)
            assert call not in self.scheduler._queue
            super().run_prefetched(call, on_returned)

    scene = Scene(fast=0, slot=Watching, takes_next=True)
    first, second = scene.instances
    calls = scene.submit(5)
    first.finish()
    assert (first.running, first.ahead) == (calls[2:3], calls[4:])


def test_next_call_of_an_instance_that_dies_runs_before_younger_ones() -> None:
    scene = Scene(fast=0, takes_next=True)
    first, second = scene.instances
    calls = scene.submit(5)
    assert (first.ahead, second.ahead) == (calls[2:3], calls[3:4])
    first.die()
    second.finish()
    second.finish()
    assert second.running == calls[2:3]
    second.finish()
    assert second.running == calls[4:]


def test_instance_gets_another_next_call_for_one_that_cannot_be_sent() -> None:
    scene = Scene(fast=0, slot=Unsendable, takes_next=True)
    first, second = scene.instances
    scene.submit(2)
    scene.scheduler.submit(call_of(kind="unsendable", now_ns=scene.clock.now() + 2))
    calls = scene.submit(2)
    assert (first.ahead, second.ahead) == (calls[:1], calls[1:])


class PrefetchMachine(RuleBasedStateMachine):
    """Random events with one to three instances, some of which prefetch."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(early=1)
        self.scheduler = DirectScheduler(self.clock, 3)
        self.batches: list[list[Call]] = []
        self.calls: list[Call] = []
        self.instances: list[FastSlot] = []

    @initialize(fast=st.lists(st.integers(0, 3), min_size=2, max_size=3), data=st.data())
    def begin(self, fast: list[int], data: st.DataObject) -> None:
        for number in fast:
            self.instance_joins(number, data.draw(st.booleans()))

    @precondition(lambda self: len(self.instances) < 3)
    @rule(fast=st.integers(0, 3), takes_next=st.booleans())
    def instance_joins(self, fast: int, takes_next: bool) -> None:
        instance = FastSlot(self.scheduler, self.batches, fast, takes_next)
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

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def ask_for_cancellation(self, data: st.DataObject) -> None:
        error = HostError(ErrorCode.CANCELLED, "")
        data.draw(st.sampled_from(self.calls)).request_cancellation(error)

    @property
    def has_idle_instance(self) -> bool:
        return any(not instance.running for instance in self.instances)

    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        before = [(one, call) for one in self.instances for call in one.ahead]
        idle = self.has_idle_instance and len(self.instances) > 1
        for _ in range(3):
            self.clock.advance(INTERVAL)
            idle = idle and self.has_idle_instance
            for instance in self.instances:
                finishes = data.draw(st.booleans())
                if instance.running and finishes:
                    instance.taken = 0
                    instance.finish()
        stuck = [call for one, call in before if call in one.ahead[one.taken :]]
        assert not (stuck and idle), "waits behind slow calls while an instance is idle"

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

    @invariant()
    def no_next_call_waits_while_an_instance_is_idle(self) -> None:
        if self.has_idle_instance and len(self.instances) > 1:
            for one in self.instances:
                assert one.taken or one not in self.scheduler._with_next


TestPrefetch = PrefetchMachine.TestCase
TestPrefetch.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
