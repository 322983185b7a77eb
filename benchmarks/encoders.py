"""Encodes the same request in the protocols of several servers."""

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

from benchmarks.h2load import GRPC, JSON, SERVICE, LoadResult, grpc_frame, h2load
from benchmarks.servers import RunningServer


@dataclass(frozen=True)
class Model:
    """A model with its tensor names and the number of elements that it is sent."""

    name: str
    input: str
    output: str
    shape: tuple[int, ...]

    def array(self) -> npt.NDArray[np.float32]:
        """The input values, the same for every call."""
        return np.random.default_rng(7).random(self.shape, dtype=np.float32)


@dataclass(frozen=True)
class EncodedRequest:
    """A request for h2load. `answer` sends it once and returns the output, to check it."""

    url: str
    body: bytes
    headers: dict[str, str]
    answer: Callable[[], npt.NDArray[Any]]

    def measure(self, connections: int, seconds: float) -> LoadResult:
        """Runs h2load with this request and returns its figures."""
        return h2load(self.url, self.body, self.headers, connections, seconds)


def _post(url: str, body: bytes) -> Any:
    request = urllib.request.Request(url, body, JSON)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def v2_json(server: RunningServer, model: Model) -> EncodedRequest:
    """HTTP with JSON in the KServe v2 protocol."""
    array = model.array()
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{model.name}/infer"
    given = {"name": model.input, "shape": array.shape, "datatype": "FP32"}
    body = json.dumps({"inputs": [{**given, "data": array.ravel().tolist()}]}).encode()

    def answer() -> npt.NDArray[Any]:
        (output,) = _post(url, body)["outputs"]
        values: npt.NDArray[np.float32] = np.array(output["data"], np.float32)
        return values.reshape(tuple(output["shape"]))

    return EncodedRequest(url, body, JSON, answer)


def v2_grpc(server: RunningServer, model: Model) -> EncodedRequest:
    """gRPC in the KServe v2 protocol, with tensors as raw bytes."""
    array, address = model.array(), f"127.0.0.1:{server.grpc_port}"
    message = pb.ModelInferRequest(model_name=model.name)
    message.inputs.add(name=model.input, datatype="FP32", shape=array.shape)
    message.raw_input_contents.append(array.tobytes())

    def answer() -> npt.NDArray[Any]:
        given = grpcclient.InferInput(model.input, array.shape, "FP32").set_data_from_numpy(array)
        with grpcclient.InferenceServerClient(address) as client:
            result = client.infer(model.name, [given], client_timeout=60)
        found: npt.NDArray[Any] | None = result.as_numpy(model.output)
        assert found is not None, f"{model.name} has sent no {model.output}"
        return found

    body = grpc_frame(message.SerializeToString())
    return EncodedRequest(f"http://{address}/{SERVICE}/ModelInfer", body, GRPC, answer)


def plain_json(server: RunningServer, model: Model) -> EncodedRequest:
    """HTTP with JSON in the format of litserve_server.py."""
    url = f"http://127.0.0.1:{server.http_port}/{model.name}"
    body = json.dumps({"data": model.array().tolist()}).encode()
    return EncodedRequest(url, body, JSON, lambda: np.array(_post(url, body)["data"], np.float32))


RequestEncoder = Callable[[RunningServer, Model], EncodedRequest]
