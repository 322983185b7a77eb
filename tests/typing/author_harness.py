"""A test as an author writes it. Type checkers read this file; nobody runs it."""

import numpy as np
from typing_extensions import reveal_type

import triton_python_backend_utils as pb_utils
from pb_utils import testing


def half(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() / 2)])


def test_the_model() -> None:
    fakes: dict[str, testing.Fake] = {"half": half, "fixed": {"Y": np.zeros(1)}}
    with testing.load("models/m", {"max_batch_size": 8}, models=fakes) as model:
        reveal_type(model)
        reveal_type(model.infer({"X": np.zeros(1)})["Y"].shape)
        reveal_type(model.execute([model.request({"X": [1, 2]})]))
        reveal_type([record.message for record in model.logs])
