"""Models that use GPUs, without torch: their arrays are those of `producer`."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import RepositoryBuilder

CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"

_HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils
from producer import Consumed, OnGpu

def x_of(request):
    x = pb_utils.get_input_tensor_by_name(request, "X")
    assert x.is_cpu()
    return x.as_numpy()

def on_gpu(name, array):
    tensor = pb_utils.Tensor.from_dlpack(name, OnGpu(array))
    assert not tensor.is_cpu()
    return tensor

class TritonPythonModel:
"""

RETURNS = (
    _HEAD
    + """
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([on_gpu("Y", x_of(request) + 1)]) for request in requests
        ]
"""
)
"""Y = X + 1, on a GPU."""

SENDS = (
    _HEAD
    + """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(3):
                y = on_gpu("Y", x_of(request) + number)
                sender.send(pb_utils.InferenceResponse([y]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
"""Y = X, X + 1 and X + 2, on a GPU."""

ASKS = (
    _HEAD
    + """
    def execute(self, requests):
        responses = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="returns",
                inputs=[on_gpu("X", x_of(request))],
                requested_output_names=["Y"],
                preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0),
            )
            answer = asked.exec()
            y = pb_utils.get_output_tensor_by_name(answer, "Y")
            if y is None:
                responses.append(answer)
                continue
            assert not y.is_cpu()
            if CHANGES:
                consumed = Consumed(y.to_dlpack())
                consumed.write(consumed.read(x_of(request)) * 2)
            responses.append(pb_utils.InferenceResponse([y]))
        return responses
"""
)
PASSES_ON = ASKS.replace("CHANGES", "False")
"""Requests X + 1 from another model and passes it on, unseen."""
DOUBLES = ASKS.replace("CHANGES", "True")
"""Requests X + 1 from another model and doubles it on the GPU."""


def add(repository: RepositoryBuilder, name: str, model: str, config: str = CONFIG) -> None:
    """Adds a model that finds the library of arrays beside it."""
    library = Path(__file__).with_name("producer.py").read_text()
    repository.add(name, model, config, files={"1/producer.py": library})
