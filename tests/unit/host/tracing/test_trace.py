"""The events of a trace, and when a trace is complete."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from host.errors import internal
from host.inference.request import (
    ExecutionTimes,
    InferRequest,
    InferResponse,
    SharedMemoryBytes,
    Tensor,
)
from host.tracing.trace import SpanIds, Trace, TraceTree, elements, parse_trace_context, tensor_json


@pytest.mark.parametrize(
    ("datatype", "array", "text"),
    [
        ("BOOL", np.array([True, False]), "1,0"),
        ("INT8", np.array([-1, 2], np.int8), "-1,2"),
        ("UINT64", np.array([2**64 - 1], np.uint64), "18446744073709551615"),
        ("FP32", np.array([0.1, 1e9, -0.5], np.float32), "0.1,1e+09,-0.5"),
        ("FP64", np.array([np.nan, np.inf]), "nan,inf"),
        ("FP16", np.array([1], np.float16), ""),
        ("INT32", np.array([], np.int32), ""),
    ],
)
def test_elements_are_joined_by_commas(datatype: str, array: npt.NDArray[Any], text: str) -> None:
    assert elements(datatype, array.tobytes()) == text


def test_strings_are_in_quotation_marks() -> None:
    data = b"\x02\0\0\0ab" + b"\0\0\0\0" + b"\x01\0\0\0\xff"
    assert elements("BYTES", data) == '"ab","","\\xff"'


def test_a_tensor_has_name_data_shape_and_datatype() -> None:
    tensor = Tensor("X", "INT32", [1, 2], np.array([3, 4], np.int32).tobytes())
    assert tensor_json(tensor) == {"name": "X", "data": "3,4", "shape": "1,2", "dtype": "INT32"}


class GoneMemory(SharedMemoryBytes):
    """Memory that its client has taken away."""

    def __len__(self) -> int:
        return 4

    def __bytes__(self) -> bytes:
        return self.read_part(0, 4)

    def read_part(self, begin: int, size: int) -> bytes:
        raise internal("shared memory region 'x' has become too small")


def test_elements_in_memory_of_a_client_that_is_gone_are_omitted() -> None:
    expected = {"name": "X", "data": "", "shape": "1", "dtype": "FP32"}
    assert tensor_json(Tensor("X", "FP32", [1], GoneMemory())) == expected


TIMES = ExecutionTimes(started=1, inputs_ready=2, outputs_begin=3, ended=4)
REQUEST = InferRequest("m", [], id="r")


class Traced:
    """A trace with an open endpoint, and the list of complete trace trees."""

    def __init__(self, spans: SpanIds | None = None) -> None:
        self.over: list[TraceTree] = []
        numbers = itertools.count(1)
        family = TraceTree(self.over.append)
        self.trace = Trace(lambda trace: next(numbers), family, spans=spans)
        self.trace.start_response()

    def serve(self, trace: Trace) -> None:
        """Records everything that a model does with a request."""
        trace.start_inference(REQUEST, "m", 1, 5)
        trace.start_compute()
        trace.finish_compute(TIMES)
        trace.record_response(InferResponse("m", 1), True)


def test_a_trace_is_complete_when_endpoint_and_model_have_finished() -> None:
    traced = Traced()
    traced.serve(traced.trace)
    assert not traced.over
    traced.trace.finish_response()
    traced.trace.finish_response()
    assert len(traced.over) == 1


def test_a_trace_waits_for_batch_times_that_come_after_the_response() -> None:
    traced = Traced()
    trace = traced.trace
    trace.start_inference(REQUEST, "m", 1, 5)
    trace.start_compute()
    trace.record_response(InferResponse("m", 1), True)
    trace.finish_response()
    assert not traced.over
    trace.finish_compute(TIMES)
    assert [name for name, _ in trace.compute_events][0] == "COMPUTE_START"
    assert len(traced.over) == 1


def test_a_stub_that_dies_gives_no_compute_times() -> None:
    traced = Traced()
    trace = traced.trace
    trace.start_inference(REQUEST, "m", 1, 5)
    trace.start_compute()
    trace.record_response(InferResponse("m", 1, error=internal("gone")), True)
    trace.finish_compute(None)
    trace.finish_response()
    assert (trace.compute_events, trace.error) == ([], "Internal: gone")
    assert len(traced.over) == 1


def test_a_request_that_was_never_sent_does_not_wait_for_compute_times() -> None:
    traced = Traced()
    traced.trace.start_inference(REQUEST, "m", 1, 5)
    traced.trace.record_response(None, True)
    traced.trace.finish_response()
    assert len(traced.over) == 1


def test_a_rejected_request_does_not_keep_its_trace_open() -> None:
    traced = Traced()
    traced.trace.start_inference(REQUEST, "m", 1, 5)
    traced.trace.reject_inference()
    traced.trace.finish_response()
    assert len(traced.over) == 1


def test_a_request_may_be_executed_again() -> None:
    traced = Traced()
    trace = traced.trace
    trace.start_inference(REQUEST, "m", 1, 5)
    for _ in range(2):
        trace.start_compute()
        trace.finish_compute(TIMES)
    trace.record_response(None, True)
    assert not traced.over
    trace.finish_response()
    assert len(traced.over) == 1
    assert [name for name, _ in trace.compute_events].count("COMPUTE_START") == 2


def test_a_trace_waits_for_its_child_traces() -> None:
    traced = Traced()
    child = traced.trace.create_child()
    child.start_inference(REQUEST, "n", 2, 6)
    traced.serve(traced.trace)
    traced.trace.finish_response()
    assert not traced.over
    child.record_response(None, True)
    assert traced.over[0].traces == [traced.trace, child]
    assert (child.parent, child.number, child.model) == (1, 2, "n")


def test_a_child_created_after_the_end_is_not_part_of_the_trace() -> None:
    traced = Traced()
    traced.serve(traced.trace)
    child = traced.trace.create_child()
    traced.trace.finish_response()
    traced.serve(child)
    assert len(traced.over) == 1
    assert not child.model_events


def test_the_parent_span_of_a_child_is_the_current_span() -> None:
    traced = Traced(SpanIds.for_client_request(None))
    trace = traced.trace
    assert trace.span_ids is not None
    queued = trace.create_child().span_ids
    assert queued is not None and queued.parent == trace.span_ids.model
    trace.start_inference(REQUEST, "m", 1, 5)
    link = trace.start_compute()
    assert link.context == trace.span_ids.trace_headers(trace.span_ids.compute)
    computing = trace.create_child().span_ids
    assert computing is not None and computing.parent == trace.span_ids.compute
    assert computing.trace_id == trace.span_ids.trace_id
    assert trace.trace_id == f"{trace.span_ids.trace_id:032x}"


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_clients_trace_context_is_parsed() -> None:
    found = parse_trace_context({"traceparent": f" {PARENT} ", "tracestate": "a=b"}.get)
    assert found is not None
    assert (found.span, found.state) == (0xB7AD6B7169203331, "a=b")
    later = parse_trace_context({"traceparent": f"01{PARENT[2:]}-more"}.get)
    assert later is not None and later.span == found.span


def test_an_invalid_trace_context_is_ignored() -> None:
    no_headers: dict[str, str] = {}
    assert parse_trace_context(no_headers.get) is None
    assert parse_trace_context({"traceparent": PARENT.upper()}.get) is None
    assert parse_trace_context({"traceparent": f"{PARENT}-more"}.get) is None
