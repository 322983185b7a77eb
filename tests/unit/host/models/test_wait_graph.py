"""Which calls could only go on after themselves."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from host.inference import Call, InferRequest
from host.models.wait_graph import is_stuck


class Lane:
    """Runs a call that may wait for others."""

    def __init__(self, *waiting_for: Call) -> None:
        self.waiting_for: Sequence[Call] = waiting_for


class Queue:
    """Where calls wait for one of its lanes."""

    def __init__(self, *lanes: Lane) -> None:
        self.lanes = list(lanes)


def call_at(place: object) -> Call:
    call = Call(InferRequest("m", []))
    call.place = place
    return call


def test_a_call_that_nobody_has_taken_yet_is_not_stuck() -> None:
    assert not is_stuck(call_at(None))


def test_a_call_that_runs_is_not_stuck() -> None:
    assert not is_stuck(call_at(Lane()))


def test_a_call_queued_behind_work_that_goes_on_is_not_stuck() -> None:
    assert not is_stuck(call_at(Queue(Lane(), Lane())))


def test_a_call_without_any_lane_waits_for_one_to_come_back() -> None:
    assert not is_stuck(call_at(Queue()))


def test_a_model_with_one_lane_that_asks_itself_is_stuck() -> None:
    lane = Lane()
    call = call_at(Queue(lane))
    lane.waiting_for = [call]
    assert is_stuck(call)


def test_one_free_lane_is_enough() -> None:
    busy, free = Lane(), Lane()
    call = call_at(Queue(busy, free))
    busy.waiting_for = [call]
    assert not is_stuck(call)


def test_a_circle_of_two_models_is_stuck_on_either_side() -> None:
    first, second = Lane(), Lane()
    to_first, to_second = call_at(Queue(first)), call_at(Queue(second))
    first.waiting_for, second.waiting_for = [to_second], [to_first]
    assert is_stuck(to_first)
    assert is_stuck(to_second)


def test_a_call_queued_behind_a_circle_is_stuck_too() -> None:
    lane = Lane()
    queue = Queue(lane)
    lane.waiting_for = [call_at(queue)]
    assert is_stuck(call_at(queue))


def test_a_finished_call_holds_nobody_up() -> None:
    lane = Lane()
    call = call_at(Queue(lane))
    done = call_at(Queue(lane))
    done.respond(None)
    lane.waiting_for = [done]
    assert not is_stuck(call)
    assert not is_stuck(done)


def test_a_circle_through_a_running_call_is_stuck() -> None:
    """The call that runs waits for one in its own model's queue."""
    lane = Lane()
    outer = call_at(lane)
    inner = call_at(Queue(lane))
    lane.waiting_for = [inner]
    assert is_stuck(inner)
    assert is_stuck(outer)


def test_a_long_chain_without_a_circle_is_not_stuck() -> None:
    lane = Lane()
    for _ in range(50):
        call = call_at(Queue(lane))
        lane = Lane(call)
    assert not is_stuck(call_at(Queue(lane)))


def test_two_lanes_that_wait_for_the_same_busy_model_are_not_stuck() -> None:
    """A diamond: both ways lead to one lane, which goes on."""
    bottom = Queue(Lane())
    top = Queue(Lane(call_at(bottom)), Lane(call_at(bottom)))
    assert not is_stuck(call_at(top))


def test_two_lanes_that_wait_for_the_same_circle_are_stuck() -> None:
    lane = Lane()
    bottom = Queue(lane)
    lane.waiting_for = [call_at(bottom)]
    top = Queue(Lane(call_at(bottom)), Lane(call_at(bottom)))
    assert is_stuck(call_at(top))


def test_a_way_out_deep_in_the_graph_is_found() -> None:
    first, second, free = Lane(), Lane(), Lane()
    to_first = call_at(Queue(first))
    to_second = call_at(Queue(second, free))
    first.waiting_for, second.waiting_for = [to_second], [to_first]
    assert not is_stuck(to_first)
    free.waiting_for = [to_first]
    assert is_stuck(to_first)


@st.composite
def graphs(draw: st.DrawFn) -> list[Call]:
    """Models with lanes, each of which runs something that waits for at most one call."""
    queues = [
        Queue(*(Lane() for _ in range(draw(st.integers(0, 3)))))
        for _ in range(draw(st.integers(1, 4)))
    ]
    lanes = [lane for queue in queues for lane in queue.lanes]
    places = [*queues, *lanes]
    calls = [
        call_at(draw(st.sampled_from(places))) for _ in range(draw(st.integers(1, len(lanes) + 1)))
    ]
    for call in calls:
        if draw(st.integers(0, 9)) == 0:
            call.respond(None)
    for lane in lanes:
        if draw(st.integers(0, 3)):
            lane.waiting_for = [draw(st.sampled_from(calls))]
    return calls


def stuck_calls(calls: list[Call]) -> set[int]:
    """The largest set of calls of which none can end unless another one of it does."""
    stuck = {id(call) for call in calls if not call.finished}
    while True:

        def holds(lane: Lane) -> bool:
            return any(id(call) in stuck for call in lane.waiting_for)  # noqa: B023

        kept = set()
        for call in calls:
            place = call.place
            if isinstance(place, Queue):
                held = bool(place.lanes) and all(map(holds, place.lanes))
            else:
                assert isinstance(place, Lane)
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
