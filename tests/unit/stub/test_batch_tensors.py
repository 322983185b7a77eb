"""Batch inputs are computed from shapes, and batch outputs are split and reshaped."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import pb_utils
from stub.batch_tensors import BatchTensorError, BatchTensors

KINDS = {
    "BATCH_ELEMENT_COUNT": [3, 4, 5],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [3, 7, 12],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 3, 7, 12],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0, 0, 0, 0, 0],
    "BATCH_ITEM_SHAPE": [[3], [4], [5]],
    "BATCH_ITEM_SHAPE_FLATTEN": [3, 4, 5],
}
"""The expected batch inputs for requests of shapes [1, 3], [1, 4] and [1, 5]."""


def request(*shape: int, name: str = "X") -> pb_utils.InferenceRequest:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return pb_utils.InferenceRequest(
        model_name="m", requested_output_names=["Y"], inputs=[pb_utils.Tensor(name, array)]
    )


def of(
    kind: str = "", data_type: str = "TYPE_INT32", batch: int = 8, **output: Any
) -> BatchTensors:
    config: dict[str, Any] = {"max_batch_size": batch, "output": []}
    if kind:
        config["batch_input"] = [
            {
                "kind": kind,
                "target_name": ["T", "U"],
                "data_type": data_type,
                "source_input": ["X"],
            }
        ]
    if output:
        config["output"] = [{"name": "Y", **output}]
        config["batch_output"] = [{"target_name": ["Y"], "source_input": ["X"]}]
    made = BatchTensors.from_config(json.dumps(config))
    assert made is not None
    return made


def added(made: BatchTensors, *requests: pb_utils.InferenceRequest) -> Any:
    """Returns the batch input, which all requests share."""
    made.add_batch_inputs(requests)
    found = [
        pb_utils.get_input_tensor_by_name(request, name) for request in requests for name in "TU"
    ]
    arrays = [tensor.as_numpy() for tensor in found if tensor is not None]
    assert len(arrays) == 2 * len(requests)
    assert all(array.tolist() == arrays[0].tolist() for array in arrays)
    return arrays[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data_type", ["TYPE_INT32", "TYPE_FP32"])
def test_each_kind_of_batch_input_has_its_values(kind: str, data_type: str) -> None:
    array = added(of(kind, data_type), request(1, 3), request(1, 4), request(1, 5))
    assert array.dtype == (np.int32 if data_type == "TYPE_INT32" else np.float32)
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        assert array.shape == (5,)
    else:
        assert array.tolist() == KINDS[kind]


def test_shapes_are_repeated_for_each_element_of_a_batch() -> None:
    requests = request(2, 3, 1), request(1, 2, 2)
    assert added(of("BATCH_ITEM_SHAPE"), *requests).tolist() == [[3, 1], [3, 1], [2, 2]]
    requests = request(2, 3, 1), request(1, 2, 2)
    assert added(of("BATCH_ITEM_SHAPE_FLATTEN"), *requests).tolist() == [3, 1, 3, 1, 2, 2]


def test_element_counts_include_the_batch_dimension() -> None:
    assert added(of("BATCH_ELEMENT_COUNT"), request(2, 3), request(1, 4)).tolist() == [6, 4]


def test_a_model_that_does_not_batch_has_whole_shapes() -> None:
    assert added(of("BATCH_ITEM_SHAPE", batch=0), request(2, 3)).tolist() == [[2, 3]]


def test_shapes_of_different_ranks_are_an_error() -> None:
    with pytest.raises(BatchTensorError) as caught:
        of("BATCH_ITEM_SHAPE").add_batch_inputs([request(1, 3), request(1, 2, 2)])
    assert str(caught.value) == "shapes of different ranks cannot form a matrix: [[3], [2, 2]]"


def test_a_request_without_the_source_input_is_an_error() -> None:
    with pytest.raises(BatchTensorError) as caught:
        of("BATCH_ELEMENT_COUNT").add_batch_inputs([request(1, 3, name="OTHER")])
    assert str(caught.value) == "batch inputs are computed from input 'X', which a request lacks"


def test_a_configuration_without_batch_tensors_returns_none() -> None:
    config = {"max_batch_size": 0, "output": [], "batch_input": [], "batch_output": []}
    assert BatchTensors.from_config(json.dumps(config)) is None


# Outputs


def response(*shape: int, start: int = 0) -> pb_utils.InferenceResponse:
    array = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
    other = pb_utils.Tensor("Z", np.zeros(1, np.float32))
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", array), other])


def scattered(made: BatchTensors, requests: Any, responses: Any) -> list[Any]:
    found = [
        None if answer is None else pb_utils.get_output_tensor_by_name(answer, "Y")
        for answer in made.scatter_batch_outputs(requests, responses)
    ]
    return [tensor if tensor is None else tensor.as_numpy().tolist() for tensor in found]


def test_an_output_of_the_first_response_with_all_elements_is_split() -> None:
    empty = pb_utils.InferenceResponse([])
    requests = [request(1, 3), request(1, 1), request(2, 2)]
    answers = [response(8), empty, empty]
    assert scattered(of(dims=[-1]), requests, answers) == [
        [[0, 1, 2]],
        [[3]],
        [[4, 5], [6, 7]],
    ]
    assert not empty.output_tensors(), "what the model has made is left alone"
    assert answers[1] is empty


def test_each_response_may_have_its_own_output() -> None:
    requests = [request(1, 3), request(1, 2)]
    answers = [response(3), response(2, start=7)]
    assert scattered(of(dims=[-1]), requests, answers) == [[[0, 1, 2]], [[7, 8]]]


def test_other_outputs_are_unchanged() -> None:
    (answer,) = of(dims=[-1]).scatter_batch_outputs([request(1, 3)], [response(3)])
    assert answer is not None
    assert [tensor.name() for tensor in answer.output_tensors()] == ["Z", "Y"]


def test_variable_sizes_of_an_output_come_from_the_input() -> None:
    requests = [request(1, 3, 4)]
    assert np.shape(scattered(of(dims=[2, -1]), requests, [response(8)])[0]) == (1, 2, 4)


def test_a_reshaped_output_has_the_models_shape() -> None:
    made = of(dims=[-1, 1], reshape={"shape": [-1]})
    assert np.shape(scattered(made, [request(1, 3)], [response(3)])[0]) == (1, 3)


def test_errors_and_missing_responses_are_unchanged() -> None:
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))
    requests = [request(1, 3), request(1, 2), request(1, 1)]
    answers = [None, failed, response(1)]
    found = of(dims=[-1]).scatter_batch_outputs(requests, answers)
    assert found[0] is None
    assert found[1] is failed
    assert scattered(of(dims=[-1]), requests, answers)[2] == [[0]]


def test_an_output_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BatchTensorError) as caught:
        of(dims=[-1]).scatter_batch_outputs(
            [request(1, 3), request(1, 2)], [response(4), response(2)]
        )
    assert str(caught.value) == (
        "output 'Y' of request 0 has 4 elements, but its input gives it the shape [1, 3]"
    )
    with pytest.raises(BatchTensorError) as caught:
        of(dims=[-1, -1]).scatter_batch_outputs([request(1, 3)], [response(3)])
    assert str(caught.value) == (
        "output 'Y' of shape [-1, -1, -1] takes its variable sizes from input 'X', whose shape"
        " [1, 3] has no such dimension"
    )
