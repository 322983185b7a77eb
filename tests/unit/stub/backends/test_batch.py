"""Joining requests, splitting outputs, and checking a configuration, without any framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pb_utils
from stub.backends.batch import Array, Batch, InvalidInput, RawTensor, RunFunction, run_requests
from stub.backends.model_contract import ModelContract, ModelTensor
from stub.user_model import ModelFailure


def entry(name: str, dims: list[int], kind: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": kind, "dims": dims, **more}


def contract(
    inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], size: int = 8, **more: Any
) -> ModelContract:
    return ModelContract(
        {"name": "m", "max_batch_size": size, "input": inputs, "output": outputs, **more}
    )


def request(*outputs: str, **arrays: Any) -> pb_utils.InferenceRequest:
    tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
    return pb_utils.InferenceRequest(
        inputs=tensors, requested_output_names=list(outputs), model_name="m", request_id="r"
    )


def rows(*values: float) -> Any:
    return np.array(values, np.float32).reshape(-1, 1)


ONE = contract([entry("x", [1])], [entry("y", [1]), entry("z", [1])])


def double(inputs: Mapping[str, Any], wanted: list[str]) -> dict[str, Any]:
    return {name: inputs["x"] * (2 if name == "y" else 3) for name in wanted}


def test_inputs_are_joined_once_and_outputs_split_without_copying() -> None:
    batch = Batch([request("y", x=rows(1, 2)), request("y", x=rows(3))], ONE)
    assert batch.inputs["x"].tolist() == [[1], [2], [3]]
    output = np.array([[10], [20], [30]], np.float32)
    first, second = batch.responses({"y": output})
    for response, part in ((first, output[:2]), (second, output[2:])):
        (tensor,) = response.output_tensors()
        assert tensor.as_numpy(copy=False).tolist() == part.tolist()
        assert np.shares_memory(tensor.as_numpy(copy=False), output)


def test_a_single_request_is_not_copied() -> None:
    x = rows(1, 2)
    assert np.shares_memory(Batch([request("y", x=x)], ONE).inputs["x"], x)


def test_each_request_gets_its_requested_outputs() -> None:
    asked = [request("y", x=rows(1)), request("z", x=rows(2)), request("y", "z", x=rows(3))]
    got = [
        {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}
        for response in run_requests(asked, ONE, double)
    ]
    assert got == [{"y": [[2]]}, {"z": [[6]]}, {"y": [[6]], "z": [[9]]}]
    assert Batch([request("z", x=rows(1))], ONE).wanted == ["z"]


def refuse(inputs: Mapping[str, Array], wanted: list[str]) -> dict[str, Array]:
    raise InvalidInput("not with me")


@pytest.mark.parametrize("size", [0, 8])
@pytest.mark.parametrize(
    "run",
    [
        double,
        refuse,
        lambda inputs, wanted: {"y": rows(1, 2), "z": rows(3, 4)},
        lambda inputs, wanted: {"y": rows(1, 2, 3)[::-1], "z": np.asfortranarray(rows(4, 5, 6))},
        lambda inputs, wanted: {"y": rows(), "z": np.float32(1)},
        lambda inputs, wanted: {"y": np.float32(1), "z": rows(1)},
        lambda inputs, wanted: {"y": np.array(["a", "b"])},
        lambda inputs, wanted: {"y": np.zeros((2, 1), np.int8), "z": rows(1)},
    ],
    ids=["same", "refused", "two", "more", "none", "scalar", "text", "type"],
)
@pytest.mark.parametrize("outputs", [["y"], ["z", "y"], []])
def test_a_single_request_gets_the_same_response_as_in_a_batch(
    run: RunFunction, size: int, outputs: list[str]
) -> None:
    """A contract that is not plain disables the fast path for single requests."""
    tensors = [entry("x", [1])], [entry("y", [1]), entry("z", [1])]
    plain = contract(*tensors, size)
    other = contract(tensors[0], [*tensors[1], entry("s", [1], is_shape_tensor=True)], size)
    assert plain.has_only_plain_tensors and not other.has_only_plain_tensors

    def told(contract: ModelContract) -> object:
        try:
            (response,) = run_requests([request(*outputs, x=rows(1, 2))], contract, run)
        except pb_utils.TritonModelException as error:
            return str(error)
        if response.has_error():
            failure = response.error()
            assert failure is not None
            return failure.code(), failure.message()
        return [
            (tensor.name(), tensor.triton_dtype(), tensor.shape(), tensor.as_numpy().tolist())
            for tensor in response.output_tensors()
        ]

    assert told(plain) == told(other)


def test_shape_tensors_are_not_joined_and_their_first_value_is_the_whole_batch() -> None:
    sizes = entry("n", [2], "TYPE_INT32", is_shape_tensor=True)
    shaped = contract([sizes, entry("x", [1])], [sizes, entry("y", [1])])
    asked = [
        request("n", "y", n=np.array([count, 5, 6], np.int32), x=rows(*values))
        for count, values in ((1, [1]), (2, [2, 3]))
    ]
    seen: list[Any] = []

    def run(inputs: Mapping[str, Any], wanted: list[str]) -> dict[str, Any]:
        seen.append((inputs["n"].tolist(), inputs["x"].tolist()))
        return {"n": inputs["n"] * 1, "y": inputs["x"]}

    first, second = run_requests(asked, shaped, run)
    assert seen == [([3, 5, 6], [[1], [2], [3]])]
    assert first.output_tensors()[0].as_numpy().tolist() == [1, 5, 6]
    assert second.output_tensors()[0].as_numpy().tolist() == [2, 5, 6]
    assert second.output_tensors()[1].as_numpy().tolist() == [[2], [3]]


@pytest.mark.parametrize("size", [8, 0])
def test_non_linear_tensors_are_joined_and_split_by_items(size: int) -> None:
    raw = entry("x", [1, 1, 3], "TYPE_INT8", is_non_linear_format_io=True)
    own = contract([raw], [{**raw, "name": "y"}], size=size)
    lead = [[1], [2]] if size else [[], []]
    asked = [
        pb_utils.InferenceRequest(
            inputs=[
                pb_utils.Tensor._from_wire(
                    "x", 7, [*shape, 1, 1, 3], memoryview(bytes([n] * 4 * sum(shape or [1]))), None
                )
            ],
            requested_output_names=["y"],
            model_name="m",
        )
        for n, shape in enumerate(lead, 1)
    ]
    seen: list[Any] = []

    def run(inputs: Mapping[str, Any], wanted: list[str]) -> dict[str, Any]:
        x = inputs["x"]
        seen.append((x.shape, x.data.tolist()))
        return {"y": RawTensor(x.data + 10, x.shape)}

    responses = run_requests(asked, own, run)
    got = [response.output_tensors()[0] for response in responses]
    assert [tensor.shape() for tensor in got] == [[*shape, 1, 1, 3] for shape in lead]
    assert [bytes(tensor._wire_data()) for tensor in got] == (
        [bytes([11] * 4), bytes([12] * 8)] if size else [bytes([11] * 4), bytes([12] * 4)]
    )
    both = ([3, 1, 1, 3], [1] * 4 + [2] * 8)
    assert seen == ([both] if size else [([1, 1, 3], [n] * 4) for n in (1, 2)])


def test_a_model_without_batches_runs_requests_one_by_one() -> None:
    alone = contract([entry("x", [-1])], [entry("y", [-1])], size=0)
    runs: list[Any] = []

    def run(inputs: Mapping[str, Any], wanted: list[str]) -> dict[str, Any]:
        runs.append(inputs["x"].tolist())
        return {"y": inputs["x"]}

    answers = run_requests([request("y", x=np.ones(n, np.float32)) for n in (1, 3)], alone, run)
    assert runs == [[1], [1, 1, 1]]
    assert [each.output_tensors()[0].shape() for each in answers] == [[1], [3]]


def test_a_bad_input_fails_its_own_request_only() -> None:
    def run(inputs: Mapping[str, Any], wanted: list[str]) -> dict[str, Any]:
        if (inputs["x"] < 0).any():
            raise InvalidInput("x must not be negative")
        return double(inputs, wanted)

    good, bad = run_requests([request("y", x=rows(1)), request("y", x=rows(-1))], ONE, run)
    assert good.output_tensors()[0].as_numpy().tolist() == [[2]]
    error = bad.error()
    assert error is not None
    assert (error.code(), error.message()) == (error.INVALID_ARG, "x must not be negative")


def test_ragged_inputs_are_put_end_to_end_and_inputs_of_the_batch_are_there_once() -> None:
    ragged = contract(
        [entry("x", [-1], allow_ragged_batch=True)],
        [entry("y", [1])],
        batch_input=[{"target_name": ["ENDS"], "data_type": "TYPE_INT32"}],
    )
    ends = np.array([2, 5], np.int32)
    batch = Batch(
        [
            request("y", x=np.zeros((1, 2), np.float32), ENDS=ends),
            request("y", x=np.ones((1, 3), np.float32), ENDS=ends),
        ],
        ragged,
    )
    assert batch.inputs["x"].tolist() == [0, 0, 1, 1, 1]
    assert batch.inputs["ENDS"].tolist() == [2, 5]
    assert batch.sizes == [1, 1]


def test_a_batch_output_is_whole_in_the_first_response() -> None:
    scattered = contract(
        [entry("x", [1])], [entry("y", [-1])], batch_output=[{"target_name": ["y"]}]
    )
    first, second = run_requests(
        [request("y", x=rows(1)), request("y", x=rows(2))],
        scattered,
        lambda inputs, wanted: {"y": np.arange(5, dtype=np.float32)},
    )
    assert first.output_tensors()[0].as_numpy().tolist() == [0, 1, 2, 3, 4]
    assert not second.output_tensors()


def test_bfloat16_values_are_unchanged() -> None:
    brain = contract([entry("x", [2], "TYPE_BF16")], [entry("y", [2], "TYPE_BF16")])
    x = np.array([[1, -2]], ml_dtypes.bfloat16)
    (response,) = run_requests(
        [request("y", x=x)], brain, lambda inputs, wanted: {"y": inputs["x"]}
    )
    assert response.output_tensors()[0].as_bfloat16().tolist() == [[1, -2]]


def test_an_output_of_another_type_is_an_error() -> None:
    with pytest.raises(pb_utils.TritonModelException) as caught:
        run_requests(
            [request("y", x=rows(1))],
            ONE,
            lambda inputs, wanted: {"y": inputs["x"].astype(np.float64)},
        )
    assert str(caught.value) == (
        "configuration expects datatype TYPE_FP32 for output 'y' of model 'm', model provides "
        "TYPE_FP64"
    )


def test_an_output_that_is_too_short_fails_only_the_requests_without_rows() -> None:
    first, second = run_requests(
        [request("y", x=rows(1)), request("y", x=rows(2, 3))],
        ONE,
        lambda inputs, wanted: {"y": rows(1)},
    )
    assert not first.has_error()
    error = second.error()
    assert error is not None and error.code() == error.UNSUPPORTED
    assert error.message() == (
        "[request id: r] failed to split the output tensor 'y' in responses: expected batch size "
        "of at least 3 in model output, got 1"
    )


CONTROL = {
    "control_input": [
        {"name": "START", "control": [{"int32_false_true": [0, 1]}]},
        {"name": "CORRID", "control": [{"data_type": "TYPE_UINT64"}]},
    ]
}


def test_controls_of_sequences_are_inputs() -> None:
    made = contract([entry("x", [1])], [entry("y", [1])], sequence_batching=CONTROL)
    found = {name: (each.data_type, each.shape) for name, each in made.inputs.items()}
    assert found["START"] == ("TYPE_INT32", [-1, 1])
    assert found["CORRID"] == ("TYPE_UINT64", [-1, 1])
    provided = [ModelTensor(name, kind, shape) for name, (kind, shape) in found.items()]
    output = [ModelTensor("y", "TYPE_FP32", [-1, 1])]
    made.check_model(provided, output)
    with pytest.raises(ModelFailure) as caught:
        made.check_model(provided[:2], output)
    assert str(caught.value) == (
        "configuration specified sequence control 'CORRID', but model does not provide that input"
    )


def test_inputs_of_the_batch_may_have_any_shape_and_must_have_their_type() -> None:
    made = contract(
        [entry("x", [1])],
        [entry("y", [1])],
        batch_input=[{"target_name": ["N"], "data_type": "TYPE_INT32"}],
    )
    x, y = ModelTensor("x", "TYPE_FP32", [-1, 1]), [ModelTensor("y", "TYPE_FP32", [-1, 1])]
    made.check_model([x, ModelTensor("N", "TYPE_INT32", [-1])], y)
    with pytest.raises(ModelFailure) as caught:
        made.check_model([x, ModelTensor("N", "TYPE_FP32", [-1])], y)
    assert str(caught.value) == (
        "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'N', model "
        "provides TYPE_FP32"
    )


def test_states_of_sequences_are_inputs_and_outputs() -> None:
    state = {"input_name": "IN", "output_name": "OUT", "data_type": "TYPE_FP32", "dims": [4]}
    made = contract([entry("x", [1])], [entry("y", [1])], sequence_batching={"state": [state]})
    assert made.inputs["IN"].shape == made.outputs["OUT"].shape == [-1, 4]
    assert Batch([request("y", "OUT", x=rows(1))], made).wanted == ["y", "OUT"]
