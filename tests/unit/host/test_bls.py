"""Models as other models call them (BLS), and the detection of calls that wait for themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.bls import DeadlockDetector, WaitGraph
from host.errors import ErrorCode, HostError
from host.inference.call import Call, CallHolder
from host.inference.request import InferRequest, InferResponse
from host.scheduling.ordering import OrderedCall, ResponseOrdering
from tests.unit.host.scheduling.fake_instances import TICK, Clock

SECOND = 1_000_000_000 // TICK


class InstanceSlot(CallHolder):
    """An instance whose call may wait for other calls."""

    blocking_calls: Sequence[Call] = ()
    potentially_blocking_calls: Sequence[Sequence[Call]] = ()
    resource_holders: Sequence[CallHolder] = ()

    def __init__(self, *blocking_calls: Call) -> None:
        self.blocking_calls: Sequence[Call] = blocking_calls
        self.potentially_blocking_calls: Sequence[Sequence[Call]] = ()


class Queue(CallHolder):
    """A queue of calls that wait for one of its instances."""

    def __init__(self, *instances: InstanceSlot) -> None:
        self.instances: list[InstanceSlot] = list(instances)
        self.returning = False

    def may_recover(self) -> bool:
        return self.returning


def call_at(place: CallHolder | None) -> Call:
    call = Call(InferRequest("m", []))
    call.holder = place
    return call


def is_stuck(call: Call) -> bool:
    return id(call) in WaitGraph([call], ()).stuck


def test_call_without_holder_is_not_stuck() -> None:
    assert not is_stuck(call_at(None))


def test_a_call_that_runs_is_not_stuck() -> None:
    assert not is_stuck(call_at(InstanceSlot()))


def test_a_call_queued_behind_work_that_goes_on_is_not_stuck() -> None:
    assert not is_stuck(call_at(Queue(InstanceSlot(), InstanceSlot())))


def test_call_of_a_model_without_instances_is_not_stuck() -> None:
    assert not is_stuck(call_at(Queue()))


def test_single_instance_calling_its_own_model_is_stuck() -> None:
    instance = InstanceSlot()
    call = call_at(Queue(instance))
    instance.blocking_calls = [call]
    assert is_stuck(call)


def test_one_free_instance_is_enough() -> None:
    busy, free = InstanceSlot(), InstanceSlot()
    call = call_at(Queue(busy, free))
    busy.blocking_calls = [call]
    assert not is_stuck(call)


def test_cycle_of_two_models_is_stuck_on_either_side() -> None:
    first, second = InstanceSlot(), InstanceSlot()
    to_first, to_second = call_at(Queue(first)), call_at(Queue(second))
    first.blocking_calls, second.blocking_calls = [to_second], [to_first]
    assert is_stuck(to_first)
    assert is_stuck(to_second)


def test_call_queued_behind_a_cycle_is_stuck() -> None:
    instance = InstanceSlot()
    queue = Queue(instance)
    instance.blocking_calls = [call_at(queue)]
    assert is_stuck(call_at(queue))


def test_finished_call_blocks_no_other_call() -> None:
    instance = InstanceSlot()
    call = call_at(Queue(instance))
    done = call_at(Queue(instance))
    done.respond(None)
    instance.blocking_calls = [done]
    assert not is_stuck(call)
    assert not is_stuck(done)


def test_cycle_through_a_running_call_is_stuck() -> None:
    """The running call waits for a call in the queue of its own model."""
    instance = InstanceSlot()
    outer = call_at(instance)
    inner = call_at(Queue(instance))
    instance.blocking_calls = [inner]
    assert is_stuck(inner)
    assert is_stuck(outer)


@pytest.mark.parametrize("closed", [False, True])
def test_chains_may_be_long(closed: bool) -> None:
    first = instance = InstanceSlot()
    for _ in range(5000):
        call = call_at(Queue(instance))
        instance = InstanceSlot(call)
    last = call_at(Queue(instance))
    if closed:
        first.blocking_calls = [last]
    assert is_stuck(last) == closed


def test_recovering_instance_prevents_a_deadlock() -> None:
    instance = InstanceSlot()
    queue = Queue(instance)
    call = call_at(queue)
    instance.blocking_calls = [call]
    queue.returning = True
    assert not is_stuck(call)


def test_call_ordered_behind_a_stuck_call_is_stuck() -> None:
    """One of two instances is free; the order of responses closes the cycle."""
    asks, free = InstanceSlot(), InstanceSlot()
    order = ResponseOrdering()
    first, second = OrderedCall(InferRequest("m", [])), OrderedCall(InferRequest("m", []))
    for call, instance in ((first, asks), (second, free)):
        order.add_call(call)
        call.holder = instance
    assert not is_stuck(second)
    asks.blocking_calls = [second]
    assert is_stuck(second)
    second.respond(None)
    assert is_stuck(second)
    first.cancel()
    assert not is_stuck(second)


def test_two_instances_waiting_for_the_same_busy_model_are_not_stuck() -> None:
    """A diamond: both paths lead to one instance, which can make progress."""
    bottom = Queue(InstanceSlot())
    top = Queue(InstanceSlot(call_at(bottom)), InstanceSlot(call_at(bottom)))
    assert not is_stuck(call_at(top))


def test_two_instances_waiting_for_the_same_cycle_are_stuck() -> None:
    instance = InstanceSlot()
    bottom = Queue(instance)
    instance.blocking_calls = [call_at(bottom)]
    top = Queue(InstanceSlot(call_at(bottom)), InstanceSlot(call_at(bottom)))
    assert is_stuck(call_at(top))


def test_a_free_instance_deep_in_the_graph_is_found() -> None:
    first, second, free = InstanceSlot(), InstanceSlot(), InstanceSlot()
    to_first = call_at(Queue(first))
    to_second = call_at(Queue(second, free))
    first.blocking_calls, second.blocking_calls = [to_second], [to_first]
    assert not is_stuck(to_first)
    free.blocking_calls = [to_first]
    assert is_stuck(to_first)


@st.composite
def graphs(draw: st.DrawFn) -> list[Call]:
    """Makes models whose instances wait for at most one call each."""
    queues = [
        Queue(*(InstanceSlot() for _ in range(draw(st.integers(0, 3)))))
        for _ in range(draw(st.integers(1, 4)))
    ]
    instances = [instance for queue in queues for instance in queue.instances]
    places = [*queues, *instances]
    calls = [
        call_at(draw(st.sampled_from(places)))
        for _ in range(draw(st.integers(1, len(instances) + 1)))
    ]
    for call in calls:
        if draw(st.integers(0, 9)) == 0:
            call.respond(None)
    for instance in instances:
        if draw(st.integers(0, 3)):
            instance.blocking_calls = [draw(st.sampled_from(calls))]
    return calls


def stuck_calls(calls: list[Call]) -> set[int]:
    """The largest set of calls in which each waits for another call of the set."""
    stuck = {id(call) for call in calls if not call.finished}
    while True:

        def holds(instance: InstanceSlot) -> bool:
            return any(id(call) in stuck for call in instance.blocking_calls)  # noqa: B023

        kept = set()
        for call in calls:
            place = call.holder
            if isinstance(place, Queue):
                held = bool(place.instances) and all(map(holds, place.instances))
            else:
                assert isinstance(place, InstanceSlot)
                held = holds(place)
            if id(call) in stuck and held:
                kept.add(id(call))
        if kept == stuck:
            return stuck
        stuck = kept


@given(graphs())
@settings(max_examples=400, deadline=None)
def test_it_agrees_with_the_definition_on_any_graph(calls: list[Call]) -> None:
    expected = stuck_calls(calls)
    for call in calls:
        assert is_stuck(call) == (id(call) in expected)


def failure_of(call: Call) -> list[HostError]:
    """Collects the error with which the call ends."""
    errors: list[HostError] = []

    def hear(response: InferResponse | None, final: bool) -> None:
        assert response is not None and response.error is not None
        errors.append(response.error)

    call.subscribe(hear)
    return errors


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> DeadlockDetector:
    return DeadlockDetector(clock)


TEXT = (
    "Model m - Error when running inference: the request waits for itself: every instance of"
    " model 'm' is busy with a request that waits for this one. Raise the instance_group count of"
    " 'm', or do not call it from a model that it calls"
)
ORDER_TEXT = (
    "Model m - Error when running inference: the request waits for itself: model 'm' keeps the"
    " order of its responses, and an earlier request waits for this one. Do without"
    " 'preserve_ordering', or do not call 'm' from a model that it calls"
)


def test_call_that_closes_a_cycle_fails_at_once(watch: DeadlockDetector, clock: Clock) -> None:
    instance = InstanceSlot()
    call = call_at(Queue(instance))
    instance.blocking_calls = [call]
    errors = failure_of(call)
    watch.add_call(call)
    assert [(error.code, error.message) for error in errors] == [(ErrorCode.INTERNAL, TEXT)]
    assert clock.armed == 0


def test_error_explains_a_cycle_of_ordered_responses(watch: DeadlockDetector) -> None:
    asks = InstanceSlot()
    order = ResponseOrdering()
    first, second = OrderedCall(InferRequest("m", [])), OrderedCall(InferRequest("m", []))
    for call, instance in ((first, asks), (second, InstanceSlot())):
        order.add_call(call)
        call.holder = instance
    asks.blocking_calls = [second]
    errors = failure_of(second)
    watch.add_call(second)
    assert [error.message for error in errors] == [ORDER_TEXT]
    assert not first.finished


def test_call_outside_the_cycle_does_not_fail(watch: DeadlockDetector) -> None:
    instance = InstanceSlot()
    queue = Queue(instance)
    instance.blocking_calls = [call_at(queue)]
    outside = call_at(queue)
    assert is_stuck(outside)
    watch.add_call(outside)
    assert not outside.finished


def test_cycle_that_closes_later_is_found(watch: DeadlockDetector, clock: Clock) -> None:
    """The instance that could have made progress is given up."""
    instance, other = InstanceSlot(), InstanceSlot()
    queue = Queue(instance, other)
    call = call_at(queue)
    instance.blocking_calls = [call]
    errors = failure_of(call)
    watch.add_call(call)
    clock.advance(3 * SECOND)
    assert not errors
    queue.instances.remove(other)
    queue.returning = True
    clock.advance(3 * SECOND)
    assert not errors
    queue.returning = False
    clock.advance(SECOND)
    assert [error.message for error in errors] == [TEXT]
    clock.advance(2 * SECOND)
    assert clock.armed == 0


def test_only_the_newest_call_of_a_cycle_fails(watch: DeadlockDetector, clock: Clock) -> None:
    first, second, free = InstanceSlot(), InstanceSlot(), InstanceSlot()
    queue = Queue(second, free)
    to_first, to_second = call_at(Queue(first)), call_at(queue)
    first.blocking_calls, second.blocking_calls = [to_second], [to_first]
    hangs_on = call_at(queue)
    for call in (to_first, to_second, hangs_on):
        watch.add_call(call)
    queue.instances.remove(free)
    clock.advance(SECOND)
    assert [call.finished for call in (to_first, to_second, hangs_on)] == [False, True, False]
    clock.advance(5 * SECOND)
    assert [call.finished for call in (to_first, to_second, hangs_on)] == [False, True, False]


def test_one_call_of_each_cycle_fails(watch: DeadlockDetector, clock: Clock) -> None:
    calls = []
    for _ in range(3):
        instance = InstanceSlot()
        queue = Queue(instance, InstanceSlot())
        calls.append(call_at(queue))
        instance.blocking_calls = [calls[-1]]
        watch.add_call(calls[-1])
        queue.instances.pop()
    clock.advance(SECOND)
    assert all(call.finished for call in calls)


def test_old_potentially_blocking_calls_count(watch: DeadlockDetector, clock: Clock) -> None:
    """The batch does not wait for the call yet, but cannot end before it."""
    instance = InstanceSlot()
    call = call_at(Queue(instance))
    instance.potentially_blocking_calls = [[call]]
    watch.add_call(call)
    clock.advance(SECOND)
    assert not call.finished
    clock.advance(SECOND)
    assert call.finished


def test_batch_without_bls_calls_prevents_a_deadlock(watch: DeadlockDetector, clock: Clock) -> None:
    """One of the overlapping batches of an instance makes no BLS calls."""
    instance = InstanceSlot()
    call = call_at(Queue(instance))
    instance.potentially_blocking_calls = [[call], []]
    watch.add_call(call)
    clock.advance(5 * SECOND)
    assert not call.finished
    instance.potentially_blocking_calls = [[call], [call]]
    clock.advance(SECOND)
    assert call.finished


def test_no_timer_runs_without_open_calls(watch: DeadlockDetector, clock: Clock) -> None:
    calls = [call_at(Queue(InstanceSlot())) for _ in range(3)]
    for call in calls:
        watch.add_call(call)
    assert clock.armed == 1
    for call in calls:
        call.respond(None)
    clock.advance(SECOND)
    assert clock.armed == 0
    watch.add_call(call_at(Queue(InstanceSlot())))
    assert clock.armed == 1


def test_finished_calls_are_removed_before_the_next_check(watch: DeadlockDetector) -> None:
    for _ in range(1000):
        call = call_at(Queue(InstanceSlot()))
        watch.add_call(call)
        call.respond(None)
    assert len(watch._open) <= 64
