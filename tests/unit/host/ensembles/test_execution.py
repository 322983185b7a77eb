"""Execution of ensembles of real models that run in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.errors import ErrorCode, HostError, internal, invalid_argument
from host.inference.request import InferResponse
from tests.unit.host.ensembles.members import (
    MAX_OUTSTANDING,
    Caller,
    Graph,
    InMemoryModel,
    Outputs,
    Values,
    chain,
    diamond,
)

SEQUENCE = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}


def times_ten(values: Values) -> Outputs:
    return {"A": values["X"] * 10}


def count_up(most: int) -> Callable[[Values], Iterable[Outputs]]:
    """A stream of input X, X + 1, and so on."""
    return lambda values: [{"A": values["X"] + index} for index in range(most)]


def raise_defect(values: Values) -> Outputs:
    raise RuntimeError("a defect")


def with_loop(test: Callable[[], None]) -> None:
    """Runs a test in an event loop, which timeouts of permits need."""

    async def main() -> None:
        test()

    asyncio.run(main())


# Order of steps


def test_steps_of_a_chain_run_one_after_the_other() -> None:
    models = [InMemoryModel(name, paused=True) for name in ("first", "second", "third")]
    graph = chain(*models)
    caller = graph.infer(I=5)
    for index, model in enumerate(models):
        assert [len(m.started) for m in models] == [int(m in models[: index + 1]) for m in models]
        model.run_next()
    assert [model.started for model in models] == [[{"X": 5}], [{"X": 6}], [{"X": 7}]]
    assert caller.outputs == [{"O": 8}] and caller.finals == [True]
    assert caller.parameters == [SEQUENCE] and graph.idle


@pytest.mark.parametrize("left_first", [True, False])
def test_branches_run_at_the_same_time_and_meet_once_both_have_ended(left_first: bool) -> None:
    left = InMemoryModel("left", paused=True)
    right = InMemoryModel("right", times_ten, paused=True)
    graph, join = diamond(InMemoryModel("source"), left, right)
    caller = graph.infer(I=1)
    assert left.started == right.started == [{"X": 2}]
    assert graph.memory.moved == [2]  # once, for two readers
    first, second = (left, right) if left_first else (right, left)
    first.run_next()
    assert not join.started and not caller.finals
    second.run_next()
    assert join.started == [{"X": 3, "Y": 20}]
    assert caller.outputs == [{"O": 23}] and graph.idle


def test_only_steps_that_the_requested_outputs_need_are_run() -> None:
    one, other = InMemoryModel("one"), InMemoryModel("other")
    graph = Graph((one, {"X": "I"}, {"A": "O"}), (other, {"X": "I"}, {"A": "P"}), outputs="O P")
    caller = graph.infer(I=1, requested_outputs=["P"])
    assert caller.outputs == [{"P": 2}]
    assert not one.started and other.started


def test_output_that_is_listed_twice_is_returned_once() -> None:
    model = InMemoryModel("m", lambda v: {"A": 1, "B": 2}, outputs="A B")
    graph = Graph((model, {"X": "I"}, {"A": "O", "B": "P"}), outputs="O P O")
    caller = graph.infer(I=1)
    assert caller.error is None and graph.idle
    assert [t.name for t in caller.responses[0].outputs] == ["O", "P"]

    stream = InMemoryModel("s", stream=count_up(2))
    caller = Graph((stream, {"X": "I"}, {"A": "O"}), outputs="O O").infer(I=1)
    assert caller.outputs == [{"O": 1}, {"O": 2}] and caller.finals == [False, False, True]


def test_input_that_is_listed_twice_counts_once() -> None:
    model = InMemoryModel("m", inputs="X X")
    graph = Graph((model, {"X": "I"}, {"A": "O"}), inputs="I I")
    assert graph.infer(I=1).outputs == [{"O": 2}]
    assert model.started == [{"X": 1}]


# Missing tensors


def test_step_runs_without_an_optional_input_that_the_client_leaves_out() -> None:
    model = InMemoryModel("m", lambda v: {"A": 7}, inputs="X Y?")
    graph = Graph((model, {"X": "I", "Y": "J"}, {"A": "O"}), inputs="I J?")
    assert graph.infer(I=1).outputs == graph.infer(I=1, J=2).outputs == [{"O": 7}]
    assert model.started == [{"X": 1}, {"X": 1, "Y": 2}]


def test_output_that_a_step_does_not_make_is_missing_for_the_steps_after_it() -> None:
    maker = InMemoryModel("maker", lambda v: {"A": 3}, outputs="A B")
    taker = InMemoryModel("taker", lambda v: {"A": 4}, inputs="X? Y?")
    graph = Graph(
        (maker, {"X": "I"}, {"A": "O", "B": "b"}), (taker, {"Y": "b"}, {"A": "P"}), outputs="O P"
    )
    assert graph.infer(I=1).outputs == [{"O": 3, "P": 4}]
    assert taker.started == [{}]


def test_step_fails_without_a_required_input_and_the_text_is_its_own() -> None:
    maker = InMemoryModel("maker", lambda v: {}, outputs="A")
    taker = InMemoryModel("taker")
    graph = chain(maker, taker)
    caller = graph.infer(I=1, id="r")
    assert caller.error is not None and caller.error.code is ErrorCode.INVALID_ARG
    assert caller.error.message == (
        "in ensemble 'graph', [request id: r] expected 1 inputs but got 0 inputs for model 'taker'."
        " Got input(s) [], but missing required input(s) ['X']. Please provide all required"
        " input(s)."
    )
    assert not taker.started and graph.idle


def test_outputs_without_elements_bring_no_sequence_parameters() -> None:
    empty = InMemoryModel("m", lambda v: {"A": -1})
    caller = chain(empty).infer(I=1)
    assert [t.shape for t in caller.responses[0].outputs] == [[0]]
    assert caller.parameters == [{}]
    half = InMemoryModel("m", lambda v: {"A": 1, "B": -1}, outputs="A B")
    graph = Graph((half, {"X": "I"}, {"A": "O", "B": "P"}), outputs="O P")
    assert graph.infer(I=1).parameters == [SEQUENCE]


# Errors


@pytest.mark.parametrize("later", [{"A": 1}, internal("the second one")])
def test_first_error_is_the_answer_once_the_other_steps_have_ended(later: Outputs) -> None:
    left = InMemoryModel("left", lambda v: invalid_argument("the first one"), paused=True)
    right = InMemoryModel("right", lambda v: later, paused=True)
    graph, join = diamond(InMemoryModel("source"), left, right)
    caller = graph.infer(I=1)
    left.run_next()
    assert not caller.finals
    right.run_next()
    assert caller.error is not None and caller.finals == [True]
    assert caller.error.code is ErrorCode.INVALID_ARG
    assert caller.error.message == "in ensemble 'graph', the first one"
    assert not join.started and graph.idle and not right.cancelled


def test_error_ends_a_stream_after_the_responses_before_it() -> None:
    def refuse_two(values: Values) -> Outputs:
        return internal("no") if values["X"] == 2 else {"A": values["X"]}

    graph = chain(InMemoryModel("stream", stream=count_up(9)), InMemoryModel("m", refuse_two))
    caller = graph.infer(I=1)
    assert caller.outputs == [{"O": 1}] and caller.finals == [False, True]
    assert caller.error is not None and caller.error.message == "in ensemble 'graph', no"
    assert graph.models[0].sent == 9 and graph.idle


@pytest.mark.parametrize("stream", [False, True])
def test_defect_of_a_step_is_an_internal_error_and_is_logged_with_its_traceback(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = InMemoryModel("first", stream=count_up(9)) if stream else InMemoryModel("first")
    graph = chain(first, InMemoryModel("second", raise_defect))
    with caplog.at_level(logging.ERROR, "pbhost"):
        caller = graph.infer(I=1)
    assert caller.finals == [True] and caller.error is not None
    assert caller.error.code is ErrorCode.INTERNAL
    assert caller.error.message == "in ensemble 'graph', unexpected failure: RuntimeError"
    (record,) = caplog.records
    assert record.message == "unexpected failure of a request to ensemble 'graph'"
    assert record.exc_info is not None and str(record.exc_info[1]) == "a defect"
    assert graph.idle


@pytest.mark.parametrize("limit", ["", "max_inflight_requests: 1"])
def test_defect_between_steps_cancels_the_running_ones(limit: str) -> None:
    def test() -> None:
        source = InMemoryModel("source", lambda v: {"A": 1, "B": 2}, paused=True, outputs="A B")
        slow, join = InMemoryModel("slow", paused=True), InMemoryModel("join", inputs="X Y")
        graph = Graph(
            (source, {"X": "I"}, {"A": "a", "B": "b"}),
            (slow, {"X": "J"}, {"A": "s"}),
            (join, {"X": "a", "Y": "b"}, {"A": "O"}),
            (InMemoryModel("more"), {"X": "a"}, {"A": "P"}),
            inputs="I J",
            outputs="O P s",
            scheduling=limit,
        )
        caller = graph.infer(I=1, J=1)
        graph.memory.error = RuntimeError("a defect")  # tensor `a` has two readers
        source.run_next()
        assert caller.error is not None and caller.finals == [True]
        assert caller.error.message == "in ensemble 'graph', unexpected failure: RuntimeError"
        assert len(slow.cancelled) == 1 and not join.started and graph.idle
        graph.memory.error = None
        assert not graph.infer(I=1, J=1).finals  # its steps have their permits
        assert len(slow.waiting) == len(source.waiting) == 1

    with_loop(test)


@pytest.mark.parametrize("limit", ["", "max_inflight_requests: 1"])
def test_step_that_is_refused_at_once_does_not_cancel_the_running_ones(
    limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    def test() -> None:
        slow = InMemoryModel("slow", paused=True)
        maker, taker = InMemoryModel("maker", lambda v: {}), InMemoryModel("taker")
        graph = Graph(
            (slow, {"X": "I"}, {"A": "P"}),
            (maker, {"X": "I"}, {"A": "a"}),
            (taker, {"X": "a"}, {"A": "O"}),
            outputs="O P",
            scheduling=limit,
        )
        caller = graph.infer(I=1)
        assert not caller.finals and len(slow.waiting) == 1 and not slow.cancelled
        slow.run_next()
        assert caller.error is not None and caller.error.code is ErrorCode.INVALID_ARG
        assert caller.finals == [True] and graph.idle

    with_loop(test)
    assert not caplog.records


@pytest.mark.parametrize("limit", [1, 2])
def test_defect_of_a_step_in_the_middle_of_a_limited_stream_fails_that_stream_only(
    limit: int,
) -> None:
    def refuse_twelve(values: Values) -> Outputs:
        return raise_defect(values) if values["X"] == 12 else {"A": values["X"]}

    def test() -> None:
        stream = InMemoryModel("stream", stream=count_up(5))
        slow = InMemoryModel("slow", paused=True)
        last = InMemoryModel("last", refuse_twelve)
        graph = chain(stream, slow, last, scheduling=f"max_inflight_requests: {limit}")
        failing, other = graph.infer(I=10), graph.infer(I=20)
        while slow.waiting:
            slow.run_next()
        assert failing.error is not None and failing.finals[-1]
        assert failing.error.message == "in ensemble 'graph', unexpected failure: RuntimeError"
        assert other.error is None
        assert [values["O"] for values in other.outputs] == [20 + n for n in range(1, 6)]
        assert graph.idle
        graph.infer(I=30)
        assert len(slow.waiting) == limit  # the failed steps have given their permits back

    with_loop(test)


@pytest.mark.parametrize("limit", ["", "max_inflight_requests: 1"])
def test_defect_of_an_acknowledgement_fails_its_stream_only(limit: str) -> None:
    def test() -> None:
        stream = InMemoryModel("stream", stream=count_up(5))
        slow = InMemoryModel("slow", paused=True)
        graph = chain(stream, slow, scheduling=limit)
        failing = graph.infer(I=10)

        def refuse(response: InferResponse) -> None:
            raise RuntimeError("a defect")

        for call in list(stream._calls):
            call.on_response_acknowledged = refuse
        other = graph.infer(I=20)
        for _ in range(20):
            if slow.waiting:
                slow.run_next()
        assert failing.error is not None and failing.finals[-1]
        assert failing.error.message == "in ensemble 'graph', unexpected failure: RuntimeError"
        assert [values["O"] for values in other.outputs] == [20 + n for n in range(1, 6)]
        assert other.error is None and graph.idle

    with_loop(test)


def test_defect_before_a_step_is_submitted_is_an_internal_error() -> None:
    first, second = InMemoryModel("first", paused=True), InMemoryModel("second")
    graph = chain(first, second)
    caller = graph.infer(I=1)
    del second.version  # it is a part of the step's request
    first.run_next()
    assert caller.error is not None and caller.finals == [True]
    assert caller.error.message == "in ensemble 'graph', unexpected failure: AttributeError"
    assert not second.started and graph.idle


def test_stream_comes_to_its_end_after_an_error_even_if_the_caller_reads_nothing() -> None:
    def refuse_131(values: Values) -> Outputs:
        return internal("no") if values["X"] == 131 else {"A": values["X"]}

    stream = InMemoryModel("stream", stream=count_up(250))
    graph = chain(stream, InMemoryModel("m", refuse_131))
    caller = graph.infer(I=1, reads=False)
    assert stream.sent == 250 and len(caller.outputs) == 130
    assert caller.error is not None and caller.finals[-1] and graph.idle


def test_defect_at_the_first_tensor_is_an_internal_error() -> None:
    one, other = InMemoryModel("one"), InMemoryModel("other")
    graph = Graph((one, {"X": "I"}, {"A": "O"}), (other, {"X": "I"}, {"A": "P"}), outputs="O P")
    graph.memory.error = RuntimeError("a defect")
    caller = graph.infer(I=1)
    assert caller.error is not None and caller.error.code is ErrorCode.INTERNAL
    assert not one.started and not other.started and graph.idle


# Cancellation


def cancelled(caller: Caller) -> bool:
    caller.call.cancel()
    return (
        caller.finals[-1] and caller.error is not None and caller.error.code is ErrorCode.CANCELLED
    )


def test_cancellation_reaches_each_running_step() -> None:
    left, right = (InMemoryModel(name, paused=True) for name in ("left", "right"))
    graph, join = diamond(InMemoryModel("source"), left, right)
    caller = graph.infer(I=1)
    assert cancelled(caller)
    assert [len(m.cancelled) for m in graph.models] == [0, 1, 1, 0]
    assert not join.started and graph.idle


def test_cancellation_after_the_first_of_two_branches_starts_no_further_step() -> None:
    left, right = (InMemoryModel(name, paused=True) for name in ("left", "right"))
    graph, join = diamond(InMemoryModel("source"), left, right)
    caller = graph.infer(I=1)
    left.run_next()
    assert cancelled(caller)
    assert [len(m.cancelled) for m in graph.models] == [0, 0, 1, 0]
    assert not join.started and graph.idle


def test_cancelled_step_that_waits_for_a_permit_never_starts_and_the_next_one_does() -> None:
    def test() -> None:
        model = InMemoryModel("m", paused=True)
        graph = chain(model, scheduling="max_inflight_requests: 1")
        first, second, third = (graph.infer(I=value) for value in (1, 2, 3))
        assert model.started == [{"X": 1}]
        assert cancelled(second)
        model.run_next()
        assert model.started == [{"X": 1}, {"X": 3}]
        assert cancelled(third)
        assert first.outputs == [{"O": 2}] and graph.idle
        graph.infer(I=4)
        assert model.started[-1] == {"X": 4}

    with_loop(test)


def test_cancellation_of_a_running_step_starts_no_step_that_waits_for_its_permit() -> None:
    def test() -> None:
        stream = InMemoryModel("stream", stream=count_up(9))
        slow = InMemoryModel("slow", paused=True)
        graph = chain(stream, slow, scheduling="max_inflight_requests: 1")
        caller = graph.infer(I=1)
        assert slow.started == [{"X": 1}] and stream.sent == 2
        assert cancelled(caller)
        assert slow.started == [{"X": 1}] and graph.idle

    with_loop(test)


def test_cancellation_between_responses_ends_a_stream() -> None:
    stream = InMemoryModel("stream", stream=lambda values: [{"A": 1}] * 300)
    graph = chain(stream, InMemoryModel("m"))
    caller = graph.infer(I=1, reads=False)
    assert 128 <= len(caller.outputs) < 300  # the next ones wait until the caller reads these
    sent = len(caller.outputs)
    assert cancelled(caller)
    assert len(caller.outputs) == sent and graph.idle


def test_cancellation_after_the_end_has_no_effect() -> None:
    graph = chain(InMemoryModel("m"))
    caller = graph.infer(I=1)
    caller.call.cancel()
    assert caller.finals == [True] and caller.error is None and not graph.models[0].cancelled


# Streams


def test_each_response_of_a_stream_becomes_one_and_streams_may_follow_each_other() -> None:
    graph = chain(
        InMemoryModel("tens", stream=lambda v: [{"A": 10}, {"A": 20}]),
        InMemoryModel("ones", stream=count_up(2)),
        InMemoryModel("last"),
    )
    caller = graph.infer(I=1)
    assert caller.outputs == [{"O": 11}, {"O": 12}, {"O": 21}, {"O": 22}]
    assert caller.finals == [False] * 4 + [True] and graph.idle


@pytest.mark.parametrize("ordered", [True, False])
def test_branches_of_one_response_meet_again_in_whatever_order_they_end(ordered: bool) -> None:
    left = InMemoryModel("left", paused=True)
    right = InMemoryModel("right", times_ten, paused=True)
    source = InMemoryModel("source", stream=count_up(2))
    graph, join = diamond(source, left, right, ordered=ordered)
    caller = graph.infer(I=1)
    left.run_next(1)  # of the second response
    right.run_next(0)  # of the first one
    assert not join.started
    right.run_next()
    left.run_next()
    one, other = ({"X": 2, "Y": 10}, {"X": 3, "Y": 20})
    assert join.started == ([one, other] if ordered else [other, one])
    assert caller.outputs == ([{"O": 12}, {"O": 23}] if ordered else [{"O": 23}, {"O": 12}])
    assert graph.idle


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60),
    st.sampled_from(
        [
            (False, ""),
            (True, ""),
            (False, "max_inflight_requests: 1"),
            (False, "max_inflight_requests: 3"),
        ]
    ),
)
@settings(max_examples=150, deadline=None)
def test_responses_of_each_request_keep_their_order_through_every_step(
    choices: list[tuple[int, int]], kind: tuple[bool, str]
) -> None:
    streams, limit = kind  # whether a later step sends two responses each time

    def test() -> None:
        stream = InMemoryModel("stream", stream=count_up(9))
        twice = InMemoryModel("twice", stream=count_up(1 + streams), paused=True)
        slow = InMemoryModel("slow", paused=True)
        graph = chain(stream, slow, twice, scheduling=limit)
        callers = [graph.infer(I=value) for value in (0, 40)]
        for number, index in choices:
            model = (slow, twice, slow)[number]
            if model.waiting:
                model.run_next(index % len(model.waiting))
        while slow.waiting or twice.waiting:
            (slow if slow.waiting else twice).run_next(-1)
        for caller, first in zip(callers, (0, 40), strict=True):
            assert [o["O"] for o in caller.outputs] == [
                first + number + 1 + part for number in range(9) for part in range(1 + streams)
            ]
        assert graph.idle

    with_loop(test)


def test_a_response_that_waits_for_others_holds_back_no_other_request() -> None:
    stream, slow = InMemoryModel("stream", stream=count_up(9)), InMemoryModel("slow", paused=True)
    graph = chain(stream, slow)
    first = graph.infer(I=1)
    while len(slow.waiting) > 1:
        slow.run_next(1)  # all but the first response
    assert not first.outputs and stream.sent == MAX_OUTSTANDING, "the stream is paused"
    other = graph.infer(I=11)
    while len(slow.waiting) > 1:
        slow.run_next(1)
    assert len(other.outputs) == 9
    first.call.cancel()
    assert graph.idle


def test_without_an_order_each_response_goes_at_once() -> None:
    stream, slow = InMemoryModel("stream", stream=count_up(3)), InMemoryModel("slow", paused=True)
    graph = chain(stream, slow, ordered=False)
    caller = graph.infer(I=1)
    while slow.waiting:
        slow.run_next(-1)
    assert [o["O"] for o in caller.outputs] == [4, 3, 2] and graph.idle


def test_an_error_is_the_answer_after_the_responses_before_it() -> None:
    def refuse_two(values: Values) -> Outputs:
        return {"A": values["X"]} if values["X"] < 2 else invalid_argument("no two")

    stream = InMemoryModel("stream", stream=count_up(3))
    slow = InMemoryModel("slow", refuse_two, paused=True)
    graph = chain(stream, slow)
    caller = graph.infer(I=0)
    while slow.waiting:
        slow.run_next(-1)
    assert [o["O"] for o in caller.outputs] == [0, 1]
    assert caller.error is not None and "no two" in caller.error.message and graph.idle


@pytest.mark.parametrize("final_with_last", [True, False])
def test_end_comes_with_the_last_response_or_alone(final_with_last: bool) -> None:
    stream = InMemoryModel("s", stream=count_up(2), final_with_last=final_with_last)
    caller = chain(stream, InMemoryModel("m")).infer(I=1)
    assert caller.outputs == [{"O": 2}, {"O": 3}]
    assert caller.finals == ([False, True] if final_with_last else [False, False, True])


# Flow control


def test_stream_waits_until_the_caller_acknowledges_its_responses() -> None:
    stream = InMemoryModel("stream", stream=count_up(20))
    graph = chain(stream)
    caller = graph.infer(I=1, reads=False)
    for read in range(16):
        assert stream.sent == MAX_OUTSTANDING + read
        caller.call.acknowledge_response(caller.responses[read])
    assert len(caller.outputs) == 20


def test_stream_waits_until_the_next_step_has_ended() -> None:
    stream, slow = InMemoryModel("stream", stream=count_up(9)), InMemoryModel("slow", paused=True)
    graph = chain(stream, slow)
    caller = graph.infer(I=1)
    assert stream.sent == len(slow.waiting) == MAX_OUTSTANDING
    slow.run_next()
    assert stream.sent == MAX_OUTSTANDING + 1
    while slow.waiting:
        slow.run_next()
    assert len(caller.outputs) == 9 and graph.idle


def test_permits_limit_each_step_over_all_requests_and_stop_a_stream() -> None:
    def test() -> None:
        stream = InMemoryModel("stream", stream=count_up(5))
        slow = InMemoryModel("slow", paused=True)
        graph = chain(stream, slow, scheduling="max_inflight_requests: 2")
        callers = [graph.infer(I=value) for value in (10, 20)]
        # Two requests of the step run. A third one and one of the other stream wait.
        assert len(slow.waiting) == 2 and stream.sent == 4
        while slow.waiting:
            assert len(slow.waiting) <= 2
            slow.run_next()
        assert stream.sent == 10 and graph.idle
        assert [[o["O"] for o in caller.outputs] for caller in callers] == [
            [11, 12, 13, 14, 15],
            [21, 22, 23, 24, 25],
        ]

    with_loop(test)


# Times, and the end


def test_times_are_the_sums_over_the_steps() -> None:
    models = [InMemoryModel(name, paused=True) for name in ("source", "left", "right")]
    graph, join = diamond(models[0], models[1], models[2])
    join.paused = True
    graph.infer(I=1)
    for model in (*models, join):
        model.run_next()
    spent = graph.ensemble.counters.snapshot().inference_stats
    assert (spent.compute_input.ns, spent.compute_infer.ns, spent.compute_output.ns) == (
        4,
        80,
        1200,
    )
    assert spent.success.count == spent.compute_infer.count == 1


def failing(values: Values) -> Outputs:
    return internal("no")


@pytest.mark.parametrize("compute", [times_ten, failing, raise_defect, None])
def test_models_are_held_until_the_request_ends_however_it_ends(
    compute: Callable[[Values], Outputs] | None,
) -> None:
    first = InMemoryModel("first", paused=True)
    second = InMemoryModel("second", compute or times_ten)
    graph = chain(first, second)
    caller = graph.infer(I=1)
    assert first.holds == second.holds == 1
    if compute is None:
        caller.call.cancel()
    else:
        first.run_next()
    assert caller.call.finished and caller.finals == [True]
    assert first.holds == second.holds == 0 and graph.ensemble.in_flight == 0


def test_abort_of_the_ensemble_ends_its_requests_and_releases_the_models() -> None:
    graph = chain(InMemoryModel("m", paused=True))
    callers = [graph.infer(I=value) for value in (1, 2)]
    error: HostError = internal("the model is unloaded")
    graph.ensemble.abort(error)
    assert [caller.error for caller in callers] == [error, error] and graph.idle
