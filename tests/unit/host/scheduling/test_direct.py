"""The direct scheduler: first come, first served, one call per batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from host.errors import ErrorCode, unavailable
from host.scheduling.direct import DirectScheduler
from host.scheduling.dynamic import DynamicScheduler
from host.scheduling.scheduler import Clock
from tests.unit.host.scheduling.fake_instances import (
    FakeInstanceSlot,
    call_of,
    error_of,
    same_kind,
)
from tests.unit.host.scheduling.machine import SchedulerMachine


class DirectMachine(SchedulerMachine):
    @classmethod
    def make(cls, clock: Clock) -> DirectScheduler:
        return DirectScheduler()


TestDirect = DirectMachine.TestCase
TestDirect.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


class EagerMachine(DirectMachine):
    """A single instance with one prefetched call behaves as without prefetching."""

    eager = 1
    max_instances = 1


class GreedyMachine(EagerMachine):
    """A single instance with several prefetched calls."""

    eager = 3


TestEager = EagerMachine.TestCase
TestEager.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestGreedy = GreedyMachine.TestCase
TestGreedy.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


class CountingSlot(FakeInstanceSlot):
    """Counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountingSlot.compared += 1
        return self is other

    __hash__ = object.__hash__


@pytest.mark.parametrize("make", [DirectScheduler, lambda: DynamicScheduler(1, 0, same_kind)])
def test_the_work_for_a_call_does_not_grow_with_the_instances(
    make: Callable[[], DirectScheduler | DynamicScheduler],
) -> None:
    scheduler = make()
    instances = [CountingSlot(scheduler) for _ in range(64)]
    for instance in instances:
        scheduler.instance_ready(instance)
    CountingSlot.compared = 0
    for _ in range(10):
        scheduler.submit(call_of())
        instances[-1].finish()
    assert len(instances[-1].batches) == 10
    assert CountingSlot.compared == 0


def test_call_starts_at_once_on_a_free_instance() -> None:
    scheduler = DirectScheduler()
    instance = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(instance)
    call = call_of(5)
    scheduler.submit(call)
    assert instance.batches == [[call]]
    assert (scheduler.queued, scheduler.instances) == (0, [instance])


def test_a_call_that_was_cancelled_in_the_queue_never_runs() -> None:
    scheduler = DirectScheduler()
    calls = [call_of() for _ in range(3)]
    for call in calls:
        scheduler.submit(call)
    calls[1].cancel()
    error = error_of(calls[1])
    assert error is not None
    assert error.code is ErrorCode.CANCELLED
    instance = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(instance)
    instance.finish()
    assert instance.batches == [[calls[0]], [calls[2]]]


def test_cancelling_a_running_call_informs_its_instance() -> None:
    scheduler = DirectScheduler()
    instance = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(instance)
    call = call_of()
    scheduler.submit(call)
    call.cancel()
    call.cancel()
    assert instance.cancelled == [call]


def test_calls_wait_for_an_instance_to_recover() -> None:
    scheduler = DirectScheduler()
    instance = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(instance)
    instance.die()
    call = call_of()
    scheduler.submit(call)
    assert (scheduler.queued, scheduler.instances, call.holder) == (1, [], scheduler)
    scheduler.instance_ready(instance)
    assert instance.batches == [[call]]


def test_failing_the_queue_does_not_touch_running_calls() -> None:
    scheduler = DirectScheduler()
    instance = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(instance)
    running, queued = call_of(), call_of()
    scheduler.submit(running)
    scheduler.submit(queued)
    error = unavailable("going")
    scheduler.fail_queued(error)
    assert not running.finished
    assert error_of(queued) is error
    instance.finish()
    assert instance.batches == [[running]]


def test_call_submitted_by_a_finishing_call_runs_after_queued_calls() -> None:
    scheduler = DirectScheduler()
    instance = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(instance)
    first, second, third = call_of(), call_of(), call_of()
    first.subscribe(lambda response, final: scheduler.submit(third))
    scheduler.submit(first)
    scheduler.submit(second)
    instance.finish()
    instance.finish()
    assert instance.batches == [[first], [second], [third]]


def test_prefetched_calls_of_a_dead_instance_keep_their_order() -> None:
    scheduler = DirectScheduler()
    instance = FakeInstanceSlot(scheduler, eager=3)
    scheduler.instance_ready(instance)
    calls = [call_of() for _ in range(6)]
    for call in calls:
        scheduler.submit(call)
    assert instance.ahead == calls[1:4]
    instance.die()
    assert calls[0].finished
    other = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(other)
    for _ in range(4):
        other.finish()
    assert other.batches == [[call] for call in calls[1:]]


def test_no_call_is_prefetched_while_a_dead_instance_is_being_replaced() -> None:
    scheduler = DirectScheduler()
    scheduler.may_recover = lambda: True
    busy = FakeInstanceSlot(scheduler, eager=1)
    scheduler.instance_ready(busy)
    first, second, third = call_of(), call_of(), call_of()
    scheduler.submit(first)
    scheduler.submit(second)
    scheduler.submit(third)
    assert busy.batches == [[first]] and scheduler.queued == 2
    replacement = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(replacement)
    assert replacement.batches == [[second]]  # it does not wait for the end of the first one
    busy.finish()
    assert busy.batches == [[first], [third]]
