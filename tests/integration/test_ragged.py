"""Batches of requests of different shapes, optional inputs and reshapes, on a real host."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.clients import Client, infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

LOOKS = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        seen = [{t.name(): t.as_numpy().tolist() for t in r.inputs()} for r in requests]
        text = np.array([[json.dumps(seen).encode()]], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)]) for _ in requests]
"""
DOUBLES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy().reshape(-1) for r in requests]
        everything = pb_utils.Tensor("Y", np.concatenate(rows) * 2)
        responses = [pb_utils.InferenceResponse([]) for _ in requests]
        responses[0] = pb_utils.InferenceResponse([everything])
        return responses
"""
WRONG = DOUBLES.replace("np.concatenate(rows) * 2", "np.zeros(99, np.float32)")
HEAD = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: [ 2 ] }
"""
SEEN = 'output [ { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ]'


def batch_input(kind: str) -> str:
    return f'{{ kind: {kind} target_name: "{kind}" data_type: TYPE_INT32 source_input: "X" }}'


KINDS = [
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
]
SCATTER = """
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "Y" source_input: "X" } ]
"""
OPTIONAL = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true },
        { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
dynamic_batching { }
"""
RESHAPED = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]
dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: [ 2 ] }
"""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    repository = module_repository
    asked = "batch_input [ " + ", ".join(batch_input(kind) for kind in KINDS) + " ]"
    repository.add("looks", LOOKS, HEAD + SEEN + asked)
    repository.add("doubles", DOUBLES, HEAD + SCATTER)
    repository.add("wrong", WRONG, HEAD + SCATTER)
    repository.add("optional", LOOKS, OPTIONAL + SEEN)
    repository.add("reshaped", LOOKS, RESHAPED + SEEN)
    return module_serve(repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


def rows(*values: float) -> Any:
    return tensor("X", np.array([values], dtype=np.float32))


def together(client: Client, model: str, *inputs: Any) -> list[Any]:
    """The results, or errors, of requests that are one batch."""
    answers: queue.Queue[tuple[int, Any]] = queue.Queue()
    for index, given in enumerate(inputs):
        client.async_infer(
            model,
            [given],
            lambda result, error, index=index: answers.put((index, error or result)),
        )
    found = dict(answers.get(timeout=DEADLINE) for _ in inputs)
    return [found[index] for index in range(len(inputs))]


def test_ragged_requests_share_a_batch_and_get_batch_inputs(
    client: Client,
) -> None:
    first, second = together(client, "looks", rows(1, 2, 3), rows(4))
    batch = json.loads(first.as_numpy("SEEN")[0][0])
    assert batch == json.loads(second.as_numpy("SEEN")[0][0])
    lengths = [len(request.pop("X")[0]) for request in batch]
    assert sorted(lengths) == [1, 3]
    (one, other) = lengths
    expected = {
        "BATCH_ELEMENT_COUNT": lengths,
        "BATCH_ACCUMULATED_ELEMENT_COUNT": [one, 4],
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, one, 4],
        "BATCH_ITEM_SHAPE": [[one], [other]],
        "BATCH_ITEM_SHAPE_FLATTEN": lengths,
    }
    for request in batch:
        assert len(request.pop("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE")) == 3
        assert request == expected


def test_output_of_the_whole_batch_is_split_by_request(client: Client) -> None:
    results = together(client, "doubles", rows(1, 2, 3), rows(4))
    assert [result.as_numpy("Y").tolist() for result in results] == [[[2, 4, 6]], [[8]]]


def test_an_output_that_does_not_fit_fails_the_batch(client: Client) -> None:
    errors = together(client, "wrong", rows(1, 2), rows(4))
    for error in errors:
        assert "Failed to process the request(s) for model 'wrong_0', message: output 'Y' of" in (
            str(error)
        )


def test_a_decoupled_model_has_no_outputs_of_a_batch(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("m", DOUBLES, HEAD + SCATTER + "model_transaction_policy { decoupled: true }")
    host = serve(repository)
    assert host.process.wait(DEADLINE) == 1
    host.wait_for("the responses of a decoupled model do not form a batch")


def test_optional_inputs_may_be_left_out(client: Client) -> None:
    both = client.infer("optional", [rows(1), tensor("Z", np.array([[2]], np.float32))])
    assert json.loads(both.as_numpy("SEEN")[0][0]) == [{"X": [[1.0]], "Z": [[2.0]]}]
    one = client.infer("optional", [rows(1)])
    assert json.loads(one.as_numpy("SEEN")[0][0]) == [{"X": [[1.0]]}]
    assert "but got 0 inputs" in infer_error(client.infer, "optional", [])[1]


def test_an_element_may_have_no_dimension_of_its_own(client: Client) -> None:
    results = together(client, "reshaped", rows(1), rows(2))
    (batch,) = {result.as_numpy("SEEN")[0][0] for result in results}
    assert sorted(request["X"] for request in json.loads(batch)) == [[1.0], [2.0]]


REFUSED = {
    "shape_tensor": (
        "is_shape_tensor: true",
        "shape tensors are only supported for TensorRT platform for shape_tensor",
    ),
    "non_linear": (
        "is_non_linear_format_io: true",
        "Non-linear IO format is only supported for the TensorRT platform for non_linear",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_only_tensorrt_has_are_rejected(
    repository: RepositoryBuilder, serve: Serve, name: str
) -> None:
    setting, text = REFUSED[name]
    repository.add(name, LOOKS, HEAD.replace("allow_ragged_batch: true", setting) + SEEN)
    host = serve(repository)
    assert host.process.wait(DEADLINE) == 1
    host.wait_for(text)
