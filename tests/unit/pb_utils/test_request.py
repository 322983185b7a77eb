"""Requests that a model receives or creates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from c_python_backend_utils import InferenceTrace
from pb_utils import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    PreferredMemory,
    Tensor,
    TritonModelException,
    get_input_tensor_by_name,
    stack_inputs,
)
from tests.unit.pb_utils.recording import RecordedResponder, RecordingRuntime


def tensor(name: str = "x") -> Tensor:
    return Tensor(name, np.zeros(1))


def make_request(**changes: Any) -> InferenceRequest:
    arguments: dict[str, Any] = {
        "inputs": [],
        "requested_output_names": [],
        "model_name": "m",
        **changes,
    }
    return InferenceRequest(**arguments)


def incoming(**changes: Any) -> InferenceRequest:
    arguments: dict[str, Any] = {"inputs": [], "handle": RecordedResponder(), **changes}
    return InferenceRequest._from_wire(**arguments)


def test_omitted_arguments_have_defaults() -> None:
    request = make_request()
    assert request.request_id() == ""
    assert request.correlation_id() == 0
    assert request.inputs() == []
    assert request.requested_output_names() == set()
    assert request.flags() == 0
    assert request.timeout() == 0
    assert request.parameters() == "{}"
    assert request.trace().get_context() is None
    assert request._model_version == -1
    assert request._handle is None
    assert request._preferred_memory._type is None


def test_all_arguments_may_be_given_by_position() -> None:
    x, trace = tensor(), InferenceTrace._from_wire("{}")
    memory = PreferredMemory(TRITONSERVER_MEMORY_CPU)
    request = InferenceRequest(
        "id", 7, [x], ["y", "z", "y"], "model", 3, 1, 1000, memory, trace, {"a": True}
    )
    assert request.request_id() == "id"
    assert request.correlation_id() == 7
    assert request.inputs() == [x]
    assert request.requested_output_names() == {"y", "z"}
    assert (request._model_name, request._model_version) == ("model", 3)
    assert (request.flags(), request.timeout()) == (1, 1000)
    assert request._preferred_memory is memory
    assert request.trace() is trace
    assert json.loads(request.parameters()) == {"a": True}


def test_the_model_name_may_be_bytes() -> None:
    assert make_request(model_name=np.array([b"m"], dtype=object)[0])._model_name == "m"


@pytest.mark.parametrize("value", [0, (1 << 64) - 1, "text", "", True])
def test_a_correlation_id_is_an_unsigned_integer_or_text(value: int | str) -> None:
    assert make_request(correlation_id=value).correlation_id() == value


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_a_correlation_id_out_of_range_is_a_runtime_error(value: int) -> None:
    with pytest.raises(RuntimeError):
        make_request(correlation_id=value)


@pytest.mark.parametrize("value", [1.0, b"text", [1], np.int64(1)])
def test_another_correlation_id_is_refused(value: Any) -> None:
    with pytest.raises(TritonModelException, match="^Correlation ID must be integer or string$"):
        make_request(correlation_id=value)


@pytest.mark.parametrize(
    "argument",
    [
        "request_id",
        "correlation_id",
        "inputs",
        "requested_output_names",
        "model_name",
        "model_version",
        "flags",
        "timeout",
        "preferred_memory",
        "trace",
    ],
)
def test_none_is_accepted_for_parameters_only(argument: str) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments\."):
        make_request(**{argument: None})
    assert make_request(parameters=None).parameters() == "{}"


def test_an_input_may_not_be_none() -> None:
    with pytest.raises(TritonModelException) as caught:
        make_request(request_id="7", inputs=[tensor(), None])
    assert str(caught.value) == (
        "Input tensor for request with id '7' and model name 'm' should not be empty."
    )


def test_an_output_name_may_not_be_empty() -> None:
    with pytest.raises(TritonModelException) as caught:
        make_request(requested_output_names=["y", ""])
    assert str(caught.value) == (
        "Requested output name for request with id '' and model name 'm' should not be empty."
    )


def test_parameters_are_checked() -> None:
    with pytest.raises(TritonModelException, match="^Expect dict, got <class 'list'>$"):
        make_request(parameters=["a"])
    with pytest.raises(TritonModelException, match="found type <class 'NoneType'>$"):
        make_request(parameters={"a": None})


def test_trace_cannot_be_instantiated() -> None:
    with pytest.raises(TypeError):
        InferenceTrace()


def test_fields_of_a_received_request_can_be_read() -> None:
    x = tensor()
    request = incoming(
        request_id="id",
        correlation_id="sequence",
        inputs=[x],
        requested_output_names=("y",),
        model_name="m",
        model_version=2,
        flags=3,
        timeout=5,
        parameters={"f": 0.5, "s": "t"},
        trace=InferenceTrace._from_wire("context"),
    )
    assert request.request_id() == "id"
    assert request.correlation_id() == "sequence"
    assert request.inputs() == request.inputs() == [x]
    assert request.inputs() is not request.inputs()
    assert request.requested_output_names() == {"y"}
    assert (request.flags(), request.timeout()) == (3, 5)
    assert json.loads(request.parameters()) == {"f": 0.5, "s": "t"}
    assert request.trace().get_context() == "context"
    assert "id" in repr(request)


def test_a_parameter_of_bytes_cannot_be_read() -> None:
    with pytest.raises(TritonModelException) as caught:
        incoming(parameters={"raw": b"x"}).parameters()
    assert str(caught.value) == "Unsupported parameter type for parameter 'raw'."


def test_inputs_are_found_by_name() -> None:
    first, second = tensor("a"), tensor("b")
    request = incoming(inputs=[first, second, tensor("b")])
    assert get_input_tensor_by_name(request, "b") is second
    assert get_input_tensor_by_name(request, "c") is None


def test_flags_can_be_replaced() -> None:
    request = make_request()
    request.set_flags(2)
    request.set_flags(np.uint8(3))
    assert request.flags() == 3


def test_release_flags_are_for_incoming_requests_only() -> None:
    request = incoming()
    assert request._release_flags == 1
    request.set_release_flags(TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    assert request._release_flags == 2
    with pytest.raises(TritonModelException, match="set_release_flags"):
        make_request().set_release_flags(1)


def test_cancellation_is_queried_until_it_is_true() -> None:
    exchange = RecordedResponder()
    request = incoming(handle=exchange)
    exchange.is_cancelled_results = [False, True]
    assert [request.is_cancelled() for _ in range(4)] == [False, True, True, True]


def test_a_request_made_by_the_model_has_no_cancellation() -> None:
    with pytest.raises(TritonModelException, match="is_cancelled"):
        make_request().is_cancelled()


def test_request_can_be_executed_any_number_of_times(runtime: RecordingRuntime) -> None:
    request = make_request()
    assert request.exec() is request.exec(decoupled=False) is runtime.response
    assert request.exec(0) is runtime.response  # type: ignore[call-overload]  # allowed, but not in the types
    assert runtime.requests == [request] * 3


@pytest.mark.parametrize("value", ["", "no", None, []])
def test_decoupled_must_be_a_bool(runtime: RecordingRuntime, value: Any) -> None:
    with pytest.raises(TypeError, match=r"^exec\(\): incompatible function arguments\."):
        make_request().exec(value)


def test_json_of_parameters_is_written_as_in_triton() -> None:
    assert incoming(parameters={"a": "\u00e9", "b": 1}).parameters() == '{"a":"\u00e9","b":1}'
    own = make_request(parameters={"a": "\u00e9", "b": 1}).parameters()
    assert own == r'{"a": "\u00e9", "b": 1}'
    assert make_request().parameters() == "{}"


def batch(*shapes: Sequence[int]) -> list[InferenceRequest]:
    """Requests with an input X of these shapes, whose elements count up through the batch."""
    requests, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        x = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
        requests.append(
            InferenceRequest(inputs=[Tensor("X", x)], model_name="", requested_output_names=[])
        )
    return requests


def refusal(requests: list[InferenceRequest], name: str = "X") -> str:
    with pytest.raises(TritonModelException) as caught:
        stack_inputs(requests, name)
    return str(caught.value)


@pytest.mark.parametrize("shapes", [[[2, 3]], [[1, 3], [2, 3], [1, 3]], [[0, 3], [2, 3]], [[4]]])
def test_inputs_are_stacked_and_results_split(shapes: list[list[int]]) -> None:
    requests = batch(*shapes)
    x, split = stack_inputs(requests, "X")
    assert x.ravel().tolist() == list(range(x.size))
    parts = split(2 * x)
    assert [list(part.shape) for part in parts] == shapes
    for part, request in zip(parts, requests, strict=True):
        assert (part == 2 * request.inputs()[0].as_numpy()).all()
    assert [len(part) for part in split(np.zeros(len(x)))] == [shape[0] for shape in shapes]


def test_the_stacked_array_may_be_changed() -> None:
    requests = batch([1, 2], [1, 2])
    stack_inputs(requests, "X")[0][:] = 7
    assert requests[0].inputs()[0].as_numpy().tolist() == [[0, 1]]


def test_texts_are_stacked() -> None:
    requests = [
        InferenceRequest(
            inputs=[Tensor("X", np.array([[text]], np.object_))],
            model_name="",
            requested_output_names=[],
        )
        for text in (b"a", b"b")
    ]
    assert stack_inputs(requests, "X")[0].tolist() == [[b"a"], [b"b"]]


def test_requests_that_cannot_be_stacked_are_named() -> None:
    assert refusal([]) == "There are no requests to stack."
    assert refusal(batch([1, 2], [1, 2]), "Y") == "Request 0 of the batch has no input 'Y'."
    assert refusal(batch([1, 2], [3, 4])) == (
        "Input 'X' cannot be stacked: its shape is [1, 2] in request 0 and [3, 4] in request 1 of"
        " the batch."
    )
    assert "its shape is [] in request 0" in refusal(batch([]))


def test_a_result_with_another_batch_size_is_refused() -> None:
    _, split = stack_inputs(batch([1, 2], [2, 2]), "X")
    with pytest.raises(TritonModelException) as caught:
        split(np.zeros((2, 2)))
    assert str(caught.value) == (
        "The result cannot be split: its shape is [2, 2], but the first dimension of the stacked"
        " input 'X' is 3."
    )
