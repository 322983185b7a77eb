"""Batches: who goes together, and how long anybody waits for company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from host.errors import unavailable
from host.inference import Call
from host.scheduling.dynamic import DynamicScheduler
from tests.unit.host.scheduling.lanes import Clock, FakeLane, call_of, running, same_kind
from tests.unit.host.scheduling.machine import SchedulerMachine

DELAY = 50  # ticks


class WithoutDelay(SchedulerMachine):
    largest = 4

    @staticmethod
    def make() -> DynamicScheduler:
        return DynamicScheduler(4, 0.0, same_kind)


class WithDelay(SchedulerMachine):
    largest = 4
    delay = 10

    @staticmethod
    def make() -> DynamicScheduler:
        return DynamicScheduler(4, 10 / 512, same_kind)


TestWithoutDelay = WithoutDelay.TestCase
TestWithoutDelay.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestWithDelay = WithDelay.TestCase
TestWithDelay.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def clock() -> Iterator[Clock]:
    with running(Clock()) as clock:
        yield clock


def submit(scheduler: DynamicScheduler, clock: Clock, *sizes: int, kind: str = "") -> list[Call]:
    calls = [call_of(size, kind, clock.ns) for size in sizes]
    for call in calls:
        scheduler.submit(call)
    return calls


def test_calls_that_waited_for_a_lane_go_together(clock: Clock) -> None:
    scheduler = DynamicScheduler(8, 0.0, same_kind)
    calls = submit(scheduler, clock, 3, 3, 2, 1)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    lane.finish()
    assert lane.batches == [calls[:3], calls[3:]]


def test_a_request_larger_than_the_largest_batch_goes_alone(clock: Clock) -> None:
    scheduler = DynamicScheduler(4, DELAY / 512, same_kind)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    calls = submit(scheduler, clock, 9, 1)
    assert lane.batches == [calls[:1]]


@pytest.mark.parametrize("largest", [0, 1])
def test_a_model_without_batches_gets_one_call_at_a_time(clock: Clock, largest: int) -> None:
    scheduler = DynamicScheduler(largest, DELAY / 512, same_kind)
    lane = FakeLane(scheduler)
    calls = submit(scheduler, clock, 1, 1)
    scheduler.lane_free(lane)
    lane.finish()
    assert lane.batches == [[call] for call in calls]


def test_what_does_not_fit_together_does_not_wait_for_company(clock: Clock) -> None:
    scheduler = DynamicScheduler(4, DELAY / 512, same_kind)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    first = submit(scheduler, clock, 1, kind="a")
    assert lane.batches == []
    submit(scheduler, clock, 1, kind="b")
    assert lane.batches == [first]


def test_a_batch_that_is_not_full_waits_until_its_oldest_call_is_old_enough(clock: Clock) -> None:
    scheduler = DynamicScheduler(8, DELAY / 512, same_kind)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    calls = submit(scheduler, clock, 1)
    clock.advance(DELAY - 10)
    calls += submit(scheduler, clock, 2)
    clock.advance(9)
    assert lane.batches == []
    clock.advance(1)
    assert lane.batches == [calls]
    assert clock.armed == 0


def test_a_full_batch_does_not_wait(clock: Clock) -> None:
    scheduler = DynamicScheduler(4, DELAY / 512, same_kind)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    calls = submit(scheduler, clock, 1, 3)
    assert lane.batches == [calls]


def test_waiting_for_a_lane_counts_as_waiting(clock: Clock) -> None:
    scheduler = DynamicScheduler(4, DELAY / 512, same_kind)
    calls = submit(scheduler, clock, 1)
    clock.advance(DELAY + 5)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    assert lane.batches == [calls]


def test_the_next_call_waits_its_own_time_when_the_oldest_is_cancelled(clock: Clock) -> None:
    scheduler = DynamicScheduler(4, DELAY / 512, same_kind)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    (oldest,) = submit(scheduler, clock, 1)
    clock.advance(30)
    (next_,) = submit(scheduler, clock, 1)
    oldest.cancel()
    clock.advance(DELAY - 1)
    assert lane.batches == []
    clock.advance(1)
    assert lane.batches == [[next_]]


def test_a_lane_that_dies_while_a_batch_gathers_takes_nothing(clock: Clock) -> None:
    scheduler = DynamicScheduler(4, DELAY / 512, same_kind)
    first, second = FakeLane(scheduler), FakeLane(scheduler)
    scheduler.lane_free(first)
    calls = submit(scheduler, clock, 1)
    first.die()
    clock.advance(DELAY + 1)
    assert scheduler.queued == 1
    scheduler.lane_free(second)
    assert (first.batches, second.batches) == ([], [calls])


def test_a_timer_that_finds_the_queue_empty_does_nothing(clock: Clock) -> None:
    scheduler = DynamicScheduler(4, DELAY / 512, same_kind)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    submit(scheduler, clock, 1)
    scheduler.fail_queued(unavailable("going"))
    clock.advance(DELAY + 1)
    assert lane.batches == []
    calls = submit(scheduler, clock, 4)
    assert lane.batches == [calls]


def test_one_timer_is_enough_for_many_calls(clock: Clock) -> None:
    scheduler = DynamicScheduler(100, DELAY / 512, same_kind)
    lane = FakeLane(scheduler)
    scheduler.lane_free(lane)
    submit(scheduler, clock, *[1] * 50)
    assert clock.armed == 1


def test_every_free_lane_gets_a_batch(clock: Clock) -> None:
    scheduler = DynamicScheduler(2, 0.0, same_kind)
    calls = submit(scheduler, clock, 2, 2, 2)
    lanes = [FakeLane(scheduler) for _ in range(3)]
    for lane in lanes:
        scheduler.lane_free(lane)
    assert [lane.running for lane in lanes] == [[call] for call in calls]
