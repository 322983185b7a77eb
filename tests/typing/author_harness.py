"""A test as an author writes it. Type checkers read this file; it is never run."""

from collections.abc import Iterator

import numpy as np
from typing_extensions import reveal_type

import triton_python_backend_utils as pb_utils
from pbhost import testing


def half(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() / 2)])


def many(request: pb_utils.InferenceRequest) -> Iterator[pb_utils.InferenceResponse]:
    yield half(request)


def test_the_model() -> None:
    fakes: dict[str, testing.Fake] = {"half": half, "many": many, "fixed": {"Y": np.zeros(1)}}
    with testing.load("m", {"max_batch_size": 8}, models=fakes, response_timeout=5) as model:
        reveal_type(model)
        reveal_type(model.infer({"X": np.zeros(1)})["Y"].shape)
        reveal_type(model.execute([model.request({"X": [1, 2]})]))
        reveal_type([record.message for record in model.logs])
        reveal_type([part["Y"].dtype for part in model.stream({"X": np.zeros(1)})])
        (responses,) = model.submit([model.request({"X": [1]})])
        reveal_type(responses)
        reveal_type(next(responses))
        reveal_type(model.metric("n", {"a": "b"}).value)
        reveal_type([sample.observations for sample in model.metrics()])
        reveal_type([(call.action, call.files) for call in model.control])
        reveal_type(model.is_ready())
        model.sequences_expired([7, "a"])
