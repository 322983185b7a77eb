"""The same question in the protocols of several servers, for h2load and to see the answer once."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb

from benchmarks.h2load import GRPC, JSON, SERVICE, Answered, framed, h2load
from benchmarks.servers import RunningServer


@dataclass(frozen=True)
class Model:
    """The same everywhere; what its tensors are called, and what it is asked."""

    name: str
    input: str
    output: str
    shape: tuple[int, ...]

    def array(self) -> npt.NDArray[np.float32]:
        """The same values each time."""
        return np.random.default_rng(7).random(self.shape, dtype=np.float32)


@dataclass(frozen=True)
class Question:
    """What h2load sends, and how the same is asked once to see the answer."""

    url: str
    body: bytes
    headers: dict[str, str]
    answer: Callable[[], npt.NDArray[Any]]

    def measure(self, connections: int, seconds: float) -> Answered:
        """h2load's figures."""
        return h2load(self.url, self.body, self.headers, connections, seconds)


def _post(url: str, body: bytes) -> Any:
    request = urllib.request.Request(url, body, JSON)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def v2_json(server: RunningServer, model: Model) -> Question:
    """HTTP with JSON in the v2 protocol."""
    array = model.array()
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{model.name}/infer"
    given = {"name": model.input, "shape": array.shape, "datatype": "FP32"}
    body = json.dumps({"inputs": [{**given, "data": array.ravel().tolist()}]}).encode()

    def answer() -> npt.NDArray[Any]:
        (output,) = _post(url, body)["outputs"]
        return np.array(output["data"], np.float32).reshape(output["shape"])

    return Question(url, body, JSON, answer)


def v2_grpc(server: RunningServer, model: Model) -> Question:
    """gRPC in the v2 protocol, tensors as raw bytes."""
    array, address = model.array(), f"127.0.0.1:{server.grpc_port}"
    message = pb.ModelInferRequest(model_name=model.name)
    message.inputs.add(name=model.input, datatype="FP32", shape=array.shape)
    message.raw_input_contents.append(array.tobytes())

    def answer() -> npt.NDArray[Any]:
        given = grpcclient.InferInput(model.input, array.shape, "FP32").set_data_from_numpy(array)
        with grpcclient.InferenceServerClient(address) as client:
            found = client.infer(model.name, [given], client_timeout=60).as_numpy(model.output)
        assert found is not None, f"{model.name} has sent no {model.output}"
        return found

    body = framed(message.SerializeToString())
    return Question(f"http://{address}/{SERVICE}/ModelInfer", body, GRPC, answer)


def plain_json(server: RunningServer, model: Model) -> Question:
    """HTTP with JSON as LitServe's server here has it."""
    url = f"http://127.0.0.1:{server.http_port}/{model.name}"
    body = json.dumps({"data": model.array().tolist()}).encode()
    return Question(url, body, JSON, lambda: np.array(_post(url, body)["data"], np.float32))


Ask = Callable[[RunningServer, Model], Question]
