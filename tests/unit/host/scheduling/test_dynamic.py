"""The dynamic batcher: which calls share a batch, and how long calls wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from host.errors import ErrorCode, HostError, unavailable
from host.inference.call import Call, FailureReason
from host.inference.request import InferRequest, InferResponse
from host.scheduling.dynamic import HOLD, CloseReason, DynamicScheduler, hold_from_environment
from host.scheduling.queue import PolicyQueue, QueuePolicies, QueuePolicy
from host.scheduling.scheduler import Clock as AnyClock
from tests.unit.host.scheduling.fake_instances import (
    TICK,
    Clock,
    FakeInstanceSlot,
    call_of,
    same_kind,
)
from tests.unit.host.scheduling.machine import SchedulerMachine

DELAY = 50  # ticks


def scheduler_of(machine: type[SchedulerMachine], clock: AnyClock) -> DynamicScheduler:
    return DynamicScheduler(
        machine.largest,
        machine.delay * TICK / 1e9,
        same_kind,
        preferred=machine.preferred,
        policies=machine.policies,
        hold=machine.hold,
        clock=clock,
    )


class DynamicMachine(SchedulerMachine):
    largest = 4

    @classmethod
    def make(cls, clock: AnyClock) -> DynamicScheduler:
        return scheduler_of(cls, clock)


class WithoutDelay(DynamicMachine):
    pass


class WithDelay(DynamicMachine):
    delay = 10


class WithPreferredSizes(DynamicMachine):
    largest = 8
    preferred = frozenset([2, 5])


class WithPreferredSizesAndDelay(WithPreferredSizes):
    delay = 7


class WithRoomAndPatience(DynamicMachine):
    policies = QueuePolicies(
        default=QueuePolicy(timeout_us=5 * TICK // 1000, may_shorten=True, max_size=3)
    )


class WithPriorities(DynamicMachine):
    delay = 6
    policies = QueuePolicies(
        levels=3,
        default_level=2,
        default=QueuePolicy(timeout_us=8 * TICK // 1000, delays=True, may_shorten=True),
        own={1: QueuePolicy(timeout_us=3 * TICK // 1000), 3: QueuePolicy(max_size=2)},
    )


class WithHold(DynamicMachine):
    hold = 4
    policies = QueuePolicies(default=QueuePolicy(timeout_us=20 * TICK // 1000))


def case(machine: type[SchedulerMachine], examples: int) -> Any:
    test = machine.TestCase
    test.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    return test


TestWithoutDelay = case(WithoutDelay, 25)
TestWithDelay = case(WithDelay, 30)
TestWithPreferredSizes = case(WithPreferredSizes, 25)
TestWithPreferredSizesAndDelay = case(WithPreferredSizesAndDelay, 30)
TestWithRoomAndPatience = case(WithRoomAndPatience, 40)
TestWithPriorities = case(WithPriorities, 50)
TestWithHold = case(WithHold, 25)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def new(clock: Clock, largest: int, delay: int = 0, **options: Any) -> DynamicScheduler:
    """Makes a scheduler; `delay` is in ticks."""
    return DynamicScheduler(largest, delay * TICK / 1e9, same_kind, clock=clock, **options)


def submit(scheduler: DynamicScheduler, clock: Clock, *sizes: int, kind: str = "") -> list[Call]:
    calls = [call_of(size, kind, clock.now()) for size in sizes]
    for call in calls:
        scheduler.submit(call)
    return calls


def asked(clock: Clock, **fields: Any) -> Call:
    """Makes a call whose request has these fields."""
    call = Call(InferRequest("m", [], **fields))
    call.queued_ns = clock.now()
    return call


def with_instance(scheduler: DynamicScheduler) -> FakeInstanceSlot:
    instance = FakeInstanceSlot(scheduler)
    scheduler.instance_ready(instance)
    return instance


def ending(call: Call) -> Callable[[], str]:
    """Returns a function that describes how the call ended; "" if it has not."""
    heard: list[str] = []

    def hear(response: InferResponse | None, final: bool) -> None:
        error = response.error if response is not None else None
        heard.append(f"{error.code.value}: {error.message}" if error is not None else "answered")

    call.subscribe(hear)
    return lambda: "".join(heard)


def test_calls_that_waited_for_an_instance_share_a_batch(clock: Clock) -> None:
    scheduler = new(clock, 8)
    calls = submit(scheduler, clock, 3, 3, 2, 1)
    instance = with_instance(scheduler)
    instance.finish()
    assert instance.batches == [calls[:3], calls[3:]]


def test_a_request_larger_than_the_largest_batch_goes_alone(clock: Clock) -> None:
    scheduler = new(clock, 4, DELAY)
    instance = with_instance(scheduler)
    calls = submit(scheduler, clock, 9, 1)
    assert instance.batches == [calls[:1]]


def test_a_request_without_elements_takes_the_room_of_one(clock: Clock) -> None:
    scheduler = new(clock, 2)
    calls = submit(scheduler, clock, 0, 0, 0)
    instance = with_instance(scheduler)
    assert instance.batches == [calls[:2]]


@pytest.mark.parametrize("largest", [0, 1])
def test_a_model_without_batches_gets_one_call_at_a_time(clock: Clock, largest: int) -> None:
    scheduler = new(clock, largest, DELAY)
    calls = submit(scheduler, clock, 1, 1)
    instance = with_instance(scheduler)
    instance.finish()
    assert instance.batches == [[call] for call in calls]


def test_incompatible_calls_do_not_wait(clock: Clock) -> None:
    scheduler = new(clock, 4, DELAY)
    instance = with_instance(scheduler)
    first = submit(scheduler, clock, 1, kind="a")
    assert instance.batches == []
    submit(scheduler, clock, 1, kind="b")
    assert instance.batches == [first]


def test_partial_batch_waits_until_the_delay_of_its_oldest_call(clock: Clock) -> None:
    scheduler = new(clock, 8, DELAY)
    instance = with_instance(scheduler)
    calls = submit(scheduler, clock, 1)
    clock.advance(DELAY - 10)
    calls += submit(scheduler, clock, 2)
    clock.advance(9)
    assert instance.batches == []
    clock.advance(1)
    assert instance.batches == [calls]
    assert clock.armed == 0


def test_a_full_batch_does_not_wait(clock: Clock) -> None:
    scheduler = new(clock, 4, DELAY)
    instance = with_instance(scheduler)
    calls = submit(scheduler, clock, 1, 3)
    assert instance.batches == [calls]


def test_batches_are_counted_by_why_they_were_closed(clock: Clock) -> None:
    scheduler = new(clock, 4, DELAY)
    instance = with_instance(scheduler)
    for sizes, kinds in (((1, 3), "aa"), ((4,), "a"), ((1, 1), "ab")):
        for size, kind in zip(sizes, kinds, strict=True):
            submit(scheduler, clock, size, kind=kind)
        instance.finish()
    clock.advance(DELAY)  # for the last one
    assert {why.value: count for why, count in scheduler.closed.items()} == {
        "size": 2,
        "misfit": 1,
        "delay": 1,
        "no_delay": 0,
    }
    for size, why in ((1, CloseReason.NO_DELAY), (2, CloseReason.SIZE)):
        scheduler = new(clock, 4, preferred=[2, 3])
        with_instance(scheduler)
        submit(scheduler, clock, size)
        assert scheduler.closed[why] == 1


def test_time_without_an_instance_counts_as_delay(clock: Clock) -> None:
    scheduler = new(clock, 4, DELAY)
    calls = submit(scheduler, clock, 1)
    clock.advance(DELAY + 5)
    assert with_instance(scheduler).batches == [calls]


def test_batch_grows_until_an_instance_is_ready(clock: Clock) -> None:
    """Also after its delay is over."""
    scheduler = new(clock, 8, DELAY)
    calls = submit(scheduler, clock, 1)
    clock.advance(DELAY + 5)
    calls += submit(scheduler, clock, 2)
    clock.advance(DELAY + 5)
    calls += submit(scheduler, clock, 4)
    assert with_instance(scheduler).batches == [calls]


def test_answered_callers_can_send_again_before_a_smaller_batch_forms() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 8)
    first = submit(scheduler, clock, 1, 1, 1)
    instance = with_instance(scheduler)
    assert instance.running == first
    waiting = submit(scheduler, clock, 1, 1)
    instance.finish()
    assert not instance.running
    again = submit(scheduler, clock, 1)
    assert not instance.running
    clock.read()
    assert instance.running == [*waiting, *again]


def test_a_batch_that_becomes_full_meanwhile_waits_no_longer() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 4)
    submit(scheduler, clock, 1, 1, 1)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, 1)
    instance.finish()
    submit(scheduler, clock, 1)
    assert not instance.running
    submit(scheduler, clock, 1)
    assert len(instance.running) == 4
    clock.read()
    assert len(instance.running) == 4


def test_a_batch_as_large_as_the_one_before_it_is_made_at_once() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 8)
    submit(scheduler, clock, 1, 1)
    instance = with_instance(scheduler)
    waiting = submit(scheduler, clock, 1, 1)
    instance.finish()
    assert instance.running == waiting


def test_the_first_answered_caller_to_send_again_waits_for_the_others() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 8)
    submit(scheduler, clock, 1, 1)
    instance = with_instance(scheduler)
    instance.finish()
    again = submit(scheduler, clock, 1)
    assert not instance.running
    again += submit(scheduler, clock, 1)
    clock.read()
    assert instance.running == again


def test_after_a_batch_of_one_the_next_call_starts_at_once() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 8)
    submit(scheduler, clock, 1, 1)
    instance = with_instance(scheduler)
    instance.finish()
    submit(scheduler, clock, 1)
    clock.read()
    instance.finish()
    following = submit(scheduler, clock, 1)
    assert instance.running == following


def test_after_a_large_batch_the_first_call_starts_at_once() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 64)
    submit(scheduler, clock, *[1] * 17)
    instance = with_instance(scheduler)
    instance.finish()
    following = submit(scheduler, clock, 1)
    assert instance.running == following


def test_calls_do_not_wait_for_each_other_with_several_instances() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 8)
    submit(scheduler, clock, 1, 1)
    first = with_instance(scheduler)
    second = with_instance(scheduler)
    first.finish()
    calls = submit(scheduler, clock, 1, 1)
    assert sorted(map(len, (first.running, second.running))) == [1, 1]
    assert all(call.holder in (first, second) for call in calls)


def test_instance_that_dies_before_the_batch_forms_gets_no_batch() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 8)
    submit(scheduler, clock, 1, 1)
    instance, other = with_instance(scheduler), FakeInstanceSlot(scheduler)
    waiting = submit(scheduler, clock, 1)
    instance.finish()
    scheduler.instance_removed(instance)
    clock.read()
    assert not instance.running
    scheduler.instance_ready(other)
    clock.read()
    assert other.running == waiting


def test_the_next_call_waits_its_own_time_when_the_oldest_is_cancelled(clock: Clock) -> None:
    scheduler = new(clock, 4, DELAY)
    instance = with_instance(scheduler)
    (oldest,) = submit(scheduler, clock, 1)
    clock.advance(30)
    (next_,) = submit(scheduler, clock, 1)
    oldest.cancel()
    clock.advance(DELAY - 1)
    assert instance.batches == []
    clock.advance(1)
    assert instance.batches == [[next_]]


def test_instance_that_dies_during_the_delay_gets_no_batch(clock: Clock) -> None:
    scheduler = new(clock, 4, DELAY)
    first, second = with_instance(scheduler), FakeInstanceSlot(scheduler)
    calls = submit(scheduler, clock, 1)
    first.die()
    clock.advance(DELAY + 1)
    assert scheduler.queued == 1
    scheduler.instance_ready(second)
    assert (first.batches, second.batches) == ([], [calls])


def test_no_timer_outlives_a_queue_that_has_failed(clock: Clock) -> None:
    scheduler = new(clock, 4, DELAY)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1)
    scheduler.fail_queued(unavailable("going"))
    assert clock.armed == 0
    calls = submit(scheduler, clock, 4)
    assert instance.batches == [calls]


def test_one_timer_is_enough_for_many_calls(clock: Clock) -> None:
    scheduler = new(clock, 100, DELAY)
    with_instance(scheduler)
    submit(scheduler, clock, *[1] * 50)
    assert clock.armed == 1


def test_every_free_instance_gets_a_batch(clock: Clock) -> None:
    scheduler = new(clock, 2)
    calls = submit(scheduler, clock, 2, 2, 2)
    instances = [with_instance(scheduler) for _ in range(3)]
    assert [instance.running for instance in instances] == [[call] for call in calls]


# Preferred sizes


def test_largest_reachable_preferred_size_is_used(clock: Clock) -> None:
    scheduler = new(clock, 16, preferred=[2, 4, 12])
    calls = submit(scheduler, clock, *[1] * 7)
    instance = with_instance(scheduler)
    for _ in range(2):
        instance.finish()
    assert instance.batches == [calls[:4], calls[4:6], calls[6:]]


def test_a_preferred_size_is_not_waited_for_without_a_delay(clock: Clock) -> None:
    scheduler = new(clock, 8, preferred=[4])
    instance = with_instance(scheduler)
    calls = submit(scheduler, clock, 3)
    assert instance.batches == [calls]


def test_a_preferred_size_that_is_reached_goes_at_once(clock: Clock) -> None:
    scheduler = new(clock, 8, DELAY, preferred=[2, 6])
    instance = with_instance(scheduler)
    calls = submit(scheduler, clock, 1)
    assert instance.batches == []
    calls += submit(scheduler, clock, 1)
    assert instance.batches == [calls]


def test_a_batch_stays_below_the_largest_preferred_size_rather_than_exceed_it(
    clock: Clock,
) -> None:
    scheduler = new(clock, 8, DELAY, preferred=[3])
    calls = submit(scheduler, clock, 2, 2, 1)
    instance = with_instance(scheduler)
    instance.finish()
    assert instance.batches == [calls[:1], calls[1:]]


def test_batch_after_its_delay_takes_up_to_the_largest_size(clock: Clock) -> None:
    scheduler = new(clock, 8, DELAY, preferred=[4])
    calls = submit(scheduler, clock, 3, 3, 3)
    clock.advance(DELAY)
    assert with_instance(scheduler).batches == [calls[:2]]


@pytest.mark.parametrize(
    ("delay", "preferred", "executions"),
    [(0, [4], 24), (0, [6], 12), (0, [2, 4], 24), (0, [16], 5), (0, [], 5), (DELAY, [4], 5)],
)
def test_number_of_executions_for_requests_that_miss_the_preferred_size(
    clock: Clock, delay: int, preferred: list[int], executions: int
) -> None:
    """As in Triton 2.51, where races with the batcher can save or add an execution or two."""
    scheduler = new(clock, 16, delay, preferred=preferred)
    submit(scheduler, clock, *[3] * 24)
    clock.advance(delay)
    instance = with_instance(scheduler)
    while instance.running:
        instance.finish()
    assert len(instance.batches) == executions


def test_a_single_request_may_exceed_the_largest_preferred_size(clock: Clock) -> None:
    scheduler = new(clock, 8, DELAY, preferred=[4])
    instance = with_instance(scheduler)
    calls = submit(scheduler, clock, 6)
    assert instance.batches == [calls]


# Queue policies


def test_a_full_queue_refuses_at_once(clock: Clock) -> None:
    scheduler = new(clock, 4, policies=QueuePolicies(default=QueuePolicy(max_size=2)))
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, 1, 1)  # the first one runs
    for identity, name in (("7", "7"), ("", "<id_unknown>")):
        with pytest.raises(HostError) as caught:
            scheduler.submit(asked(clock, id=identity))
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert caught.value.message == f"[request id: {name}] Exceeds maximum queue size"
    assert scheduler.queued == 2
    instance.finish()
    submit(scheduler, clock, 1)


def test_calls_that_an_idle_instance_can_take_do_not_fill_the_queue() -> None:
    clock = Clock(reads_at_once=False)
    scheduler = new(clock, 4, policies=QueuePolicies(default=QueuePolicy(max_size=2)))
    submit(scheduler, clock, 1, 1)
    instance = with_instance(scheduler)
    instance.finish()
    calls = submit(scheduler, clock, 1, 1, 1)
    assert instance.running == calls[:1]
    assert scheduler.queued == 2


def test_a_cancelled_call_makes_room(clock: Clock) -> None:
    scheduler = new(clock, 4, policies=QueuePolicies(default=QueuePolicy(max_size=1)))
    (call,) = submit(scheduler, clock, 1)
    call.cancel()
    submit(scheduler, clock, 1)


def test_calls_that_are_late_take_room(clock: Clock) -> None:
    policy = QueuePolicy(timeout_us=TICK // 1000, delays=True, max_size=1)
    scheduler = new(clock, 4, policies=QueuePolicies(default=policy))
    submit(scheduler, clock, 1)
    clock.advance(2)
    with pytest.raises(HostError, match="Exceeds maximum queue size"):
        submit(scheduler, clock, 1)


def test_a_call_that_timed_out_makes_room(clock: Clock) -> None:
    policy = QueuePolicy(timeout_us=TICK // 1000, max_size=1)
    scheduler = new(clock, 4, policies=QueuePolicies(default=policy))
    with_instance(scheduler)
    submit(scheduler, clock, 1, 1)  # the first one runs
    clock.advance(2)
    submit(scheduler, clock, 1)


def test_every_level_has_room_of_its_own(clock: Clock) -> None:
    policies = QueuePolicies(
        levels=2, default_level=2, default=QueuePolicy(max_size=1), own={2: QueuePolicy()}
    )
    scheduler = new(clock, 4, policies=policies)
    scheduler.submit(asked(clock, priority=1))
    for _ in range(3):
        scheduler.submit(asked(clock, priority=2))
    with pytest.raises(HostError, match="Exceeds maximum queue size"):
        scheduler.submit(asked(clock, priority=1))


def test_a_call_is_refused_when_its_time_is_over_and_not_before(clock: Clock) -> None:
    """Without an instance, and with an instance that is always busy."""
    scheduler = new(
        clock, 1, policies=QueuePolicies(default=QueuePolicy(timeout_us=10 * TICK // 1000))
    )
    for _ in range(2):
        call = asked(clock)
        scheduler.submit(call)
        ended = ending(call)
        clock.advance(10)
        assert ended() == ""
        clock.advance(1)
        assert ended() == "Unavailable: Request timeout expired"
        assert scheduler.queued == 0
        with_instance(scheduler)
        submit(scheduler, clock, 1)


@pytest.mark.parametrize(
    ("asked_for", "may_shorten", "over_after"),
    [(3, True, 3), (3, False, 10), (0, True, 10), (12, True, 10)],
)
def test_a_request_may_only_shorten_its_time_and_only_where_that_is_allowed(
    clock: Clock, asked_for: int, may_shorten: bool, over_after: int
) -> None:
    policy = QueuePolicy(timeout_us=10 * TICK // 1000, may_shorten=may_shorten)
    scheduler = new(clock, 1, policies=QueuePolicies(default=policy))
    call = asked(clock, timeout_us=asked_for * TICK // 1000)
    scheduler.submit(call)
    ended = ending(call)
    clock.advance(over_after)
    assert ended() == ""
    clock.advance(1)
    assert ended() == "Unavailable: Request timeout expired"


def test_without_a_timeout_of_the_model_a_request_cannot_set_one(clock: Clock) -> None:
    policy = QueuePolicy(may_shorten=True, max_size=9)
    scheduler = new(clock, 1, policies=QueuePolicies(default=policy))
    call = asked(clock, timeout_us=1)
    scheduler.submit(call)
    clock.advance(1000)
    assert not call.finished
    assert clock.armed == 0


def test_timed_out_call_does_not_run_if_the_timer_is_late(clock: Clock) -> None:
    scheduler = new(clock, 1, policies=QueuePolicies(default=QueuePolicy(timeout_us=TICK // 1000)))
    call = asked(clock)
    scheduler.submit(call)
    ended = ending(call)
    clock.ticks += 2
    assert with_instance(scheduler).batches == []
    assert ended() == "Unavailable: Request timeout expired"
    assert call.failure_reason is FailureReason.REJECTED


def test_call_that_arrives_timed_out_does_not_run(clock: Clock) -> None:
    policy = QueuePolicy(timeout_us=90 * TICK // 1000, may_shorten=True)
    scheduler = new(clock, 1, policies=QueuePolicies(default=policy))
    instance = with_instance(scheduler)
    hasty, patient = asked(clock, timeout_us=2 * TICK // 1000), asked(clock)
    ended = ending(hasty)
    clock.advance(3)  # while its tensors were copied
    scheduler.submit(hasty)
    scheduler.submit(patient)
    assert ended() == "Unavailable: Request timeout expired"
    assert hasty.failure_reason is FailureReason.REJECTED
    assert instance.batches == [[patient]]


def test_shorter_timeout_of_a_later_call_is_kept(clock: Clock) -> None:
    policy = QueuePolicy(timeout_us=90 * TICK // 1000, may_shorten=True)
    scheduler = new(clock, 1, policies=QueuePolicies(default=policy))
    patient, hasty = asked(clock), asked(clock, timeout_us=5 * TICK // 1000)
    for call in (patient, hasty):
        scheduler.submit(call)
    clock.advance(6)
    assert (patient.finished, hasty.finished) == (False, True)


def test_delayed_call_runs_after_calls_in_time_and_does_not_time_out(clock: Clock) -> None:
    policy = QueuePolicy(timeout_us=5 * TICK // 1000, delays=True)
    scheduler = new(clock, 1, policies=QueuePolicies(levels=2, default_level=1, default=policy))
    late, low = asked(clock, priority=1), asked(clock, priority=2)
    for call in (late, low):
        scheduler.submit(call)
    clock.advance(4)
    punctual = asked(clock, priority=1)
    scheduler.submit(punctual)
    clock.advance(2)
    assert scheduler.queued == 3
    instance = with_instance(scheduler)
    for _ in range(2):
        instance.finish()
    assert instance.batches == [[punctual], [late], [low]]


def test_delayed_calls_run_in_the_order_of_their_timeouts(clock: Clock) -> None:
    policy = QueuePolicy(timeout_us=5 * TICK // 1000, may_shorten=True, delays=True)
    scheduler = new(clock, 1, policies=QueuePolicies(default=policy))
    patient, hasty = asked(clock), asked(clock, timeout_us=2 * TICK // 1000)
    for call in (patient, hasty):
        scheduler.submit(call)
    clock.advance(6)
    instance = with_instance(scheduler)
    instance.finish()
    assert instance.batches == [[hasty], [patient]]


def test_a_call_that_runs_is_not_refused(clock: Clock) -> None:
    scheduler = new(clock, 1, policies=QueuePolicies(default=QueuePolicy(timeout_us=TICK // 1000)))
    instance = with_instance(scheduler)
    (call,) = submit(scheduler, clock, 1)
    clock.advance(100)
    assert instance.running == [call]


@pytest.mark.parametrize(
    ("priority", "place"), [(1, 0), (0, 1), (2, 1), (3, 2), (4, 1), (2**64, 1)]
)
def test_a_priority_that_does_not_exist_is_the_default_one(
    clock: Clock, priority: int, place: int
) -> None:
    scheduler = new(clock, 1, policies=QueuePolicies(levels=3, default_level=2))
    for level in (3, 1):
        scheduler.submit(asked(clock, priority=level))
    call = asked(clock, priority=priority)
    scheduler.submit(call)
    instance = with_instance(scheduler)
    for _ in range(2):
        instance.finish()
    place = {0: 1, 1: 1, 2: 2}[place]
    assert instance.batches[place] == [call]


def test_priorities_of_a_model_without_levels_are_ignored(clock: Clock) -> None:
    scheduler = new(clock, 1, policies=QueuePolicies(default=QueuePolicy(max_size=9)))
    calls = [asked(clock, priority=priority) for priority in (3, 1, 2)]
    for call in calls:
        scheduler.submit(call)
    instance = with_instance(scheduler)
    for _ in range(2):
        instance.finish()
    assert instance.batches == [[call] for call in calls]


def test_any_number_of_levels_costs_nothing(clock: Clock) -> None:
    scheduler = new(clock, 1, policies=QueuePolicies(levels=2**63, default_level=2**62))
    low, high = asked(clock, priority=2**63), asked(clock, priority=2**61)
    for call in (low, high):
        scheduler.submit(call)
    assert with_instance(scheduler).running == [high]


def test_queue_keeps_no_removed_calls(clock: Clock) -> None:
    """Even if their timeout is an hour away."""
    policies = QueuePolicies(default=QueuePolicy(timeout_us=3_600_000_000))
    scheduler = new(clock, 1, policies=policies)
    submit(scheduler, clock, 1)
    for _ in range(1000):
        (call,) = submit(scheduler, clock, 1)
        call.cancel()
    assert isinstance(scheduler._queue, PolicyQueue)
    assert len(scheduler._queue._ends) < 100


def test_caller_can_send_again_from_its_timeout_callback(clock: Clock) -> None:
    scheduler = new(clock, 1, policies=QueuePolicies(default=QueuePolicy(timeout_us=TICK // 1000)))
    first = asked(clock)
    first.subscribe(lambda response, final: scheduler.submit(asked(clock)))
    scheduler.submit(first)
    clock.advance(2)
    assert scheduler.queued == 1


# Holding the first batch


def test_hold_delays_the_first_batch_only(clock: Clock) -> None:
    scheduler = new(clock, 4, hold=3)
    instance = with_instance(scheduler)
    calls = submit(scheduler, clock, 1, 1)
    assert instance.batches == []
    calls += submit(scheduler, clock, 1)
    assert instance.batches == [calls]
    instance.finish()
    calls += submit(scheduler, clock, 1)
    assert instance.batches[1:] == [calls[3:]]


def test_hold_ends_without_an_instance_too(
    clock: Clock,
) -> None:
    scheduler = new(clock, 4, hold=2)
    calls = submit(scheduler, clock, 1, 1)
    calls.pop().cancel()
    assert with_instance(scheduler).batches == [calls]


@pytest.mark.parametrize(("text", "value"), [(None, 0), ("0", 0), ("12", 12)])
def test_environment_variable_sets_the_hold(
    monkeypatch: pytest.MonkeyPatch, text: str | None, value: int
) -> None:
    monkeypatch.delenv(HOLD, raising=False)
    if text is not None:
        monkeypatch.setenv(HOLD, text)
    assert hold_from_environment() == value


@pytest.mark.parametrize("text", ["", "-1", "two", "1.5"])
def test_invalid_hold_in_the_environment_is_rejected(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(HOLD, text)
    with pytest.raises(HostError) as caught:
        hold_from_environment()
    assert caught.value.message == (
        "environment variable TRITONSERVER_DELAY_SCHEDULER must be a whole number of requests,"
        f" got '{text}'"
    )
