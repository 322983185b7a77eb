"""When a trace is complete, and what is in it."""

from __future__ import annotations

import itertools

from host.errors import internal
from host.inference.request import InferRequest, InferResponse, Times
from host.tracing.context import Spans, extract
from host.tracing.trace import Family, Trace

TIMES = Times(started=1, inputs_ready=2, outputs_begin=3, ended=4)
REQUEST = InferRequest("m", [], id="r")


class Traced:
    """A trace that is open at its door, and the families that were complete."""

    def __init__(self, spans: Spans | None = None) -> None:
        self.over: list[Family] = []
        numbers = itertools.count(1)
        family = Family(self.over.append)
        self.trace = Trace(lambda trace: next(numbers), family, spans=spans)
        self.trace.open()

    def serve(self, trace: Trace) -> None:
        """All that a model does with a request."""
        trace.begin(REQUEST, "m", 1, 5)
        trace.sent()
        trace.computed(TIMES)
        trace.responded(InferResponse("m", 1), True)


def test_a_trace_is_complete_when_door_and_model_are_done() -> None:
    traced = Traced()
    traced.serve(traced.trace)
    assert not traced.over
    traced.trace.close()
    traced.trace.close()
    assert len(traced.over) == 1


def test_times_that_come_after_the_response_are_waited_for() -> None:
    traced = Traced()
    trace = traced.trace
    trace.begin(REQUEST, "m", 1, 5)
    trace.sent()
    trace.responded(InferResponse("m", 1), True)
    trace.close()
    assert not traced.over
    trace.computed(TIMES)
    assert [name for name, _ in trace.computing][0] == "COMPUTE_START"
    assert len(traced.over) == 1


def test_a_stub_that_dies_leaves_no_times() -> None:
    traced = Traced()
    trace = traced.trace
    trace.begin(REQUEST, "m", 1, 5)
    trace.sent()
    trace.responded(InferResponse("m", 1, error=internal("gone")), True)
    trace.computed(None)
    trace.close()
    assert (trace.computing, trace.error) == ([], "Internal: gone")
    assert len(traced.over) == 1


def test_a_request_that_was_never_sent_has_no_times_to_wait_for() -> None:
    traced = Traced()
    traced.trace.begin(REQUEST, "m", 1, 5)
    traced.trace.responded(None, True)
    traced.trace.close()
    assert len(traced.over) == 1


def test_a_refused_request_does_not_keep_its_trace_open() -> None:
    traced = Traced()
    traced.trace.begin(REQUEST, "m", 1, 5)
    traced.trace.refused()
    traced.trace.close()
    assert len(traced.over) == 1


def test_a_request_may_run_again() -> None:
    traced = Traced()
    trace = traced.trace
    trace.begin(REQUEST, "m", 1, 5)
    for _ in range(2):
        trace.sent()
        trace.computed(TIMES)
    trace.responded(None, True)
    assert not traced.over
    trace.close()
    assert len(traced.over) == 1
    assert [name for name, _ in trace.computing].count("COMPUTE_START") == 2


def test_children_are_waited_for() -> None:
    traced = Traced()
    child = traced.trace.child()
    child.begin(REQUEST, "n", 2, 6)
    traced.serve(traced.trace)
    traced.trace.close()
    assert not traced.over
    child.responded(None, True)
    assert traced.over[0].traces == [traced.trace, child]
    assert (child.parent, child.number, child.model) == (1, 2, "n")


def test_a_child_that_comes_too_late_is_no_part_of_it() -> None:
    traced = Traced()
    traced.serve(traced.trace)
    child = traced.trace.child()
    traced.trace.close()
    traced.serve(child)
    assert len(traced.over) == 1
    assert not child.inside


def test_spans_of_a_child_lie_in_what_their_parent_was_doing() -> None:
    traced = Traced(Spans.at_door(None))
    trace = traced.trace
    assert trace.spans is not None
    queued = trace.child().spans
    assert queued is not None and queued.parent == trace.spans.model
    trace.begin(REQUEST, "m", 1, 5)
    link = trace.sent()
    assert link.context == trace.spans.context(trace.spans.compute)
    computing = trace.child().spans
    assert computing is not None and computing.parent == trace.spans.compute
    assert computing.trace == trace.spans.trace
    assert trace.name == f"{trace.spans.trace:032x}"


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_context_from_outside() -> None:
    found = extract({"traceparent": f" {PARENT} ", "tracestate": "a=b"}.get)
    assert found is not None
    assert (found.span, found.state) == (0xB7AD6B7169203331, "a=b")
    later = extract({"traceparent": f"01{PARENT[2:]}-more"}.get)
    assert later is not None and later.span == found.span


def test_context_that_is_not_valid() -> None:
    assert extract({}.get) is None
    assert extract({"traceparent": PARENT.upper()}.get) is None
    assert extract({"traceparent": f"{PARENT}-more"}.get) is None
