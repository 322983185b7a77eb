"""Short forms of common client calls to the test models, over the real client."""

from __future__ import annotations

import json
import queue
import urllib.request
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.conftest import DEADLINE, RunningHost, wait_until

Client: TypeAlias = grpcclient.InferenceServerClient


def tensor(name: str, array: npt.NDArray[Any], datatype: str = "") -> grpcclient.InferInput:
    """An input with this array's bytes."""
    datatype = datatype or np_to_triton_dtype(array.dtype)
    return grpcclient.InferInput(name, array.shape, datatype).set_data_from_numpy(array)


def run_command(client: Client, text: str, model: str = "misbehave", **options: Any) -> str:
    """Runs a command in `misbehave`, and returns its output."""
    array = np.array([text.encode()], dtype=np.object_)
    result = client.infer(model, [tensor("COMMAND", array)], **options)
    answer: bytes = result.as_numpy("ANSWER")[0]
    return answer.decode()


def infer_through(client: Client, target: str, array: npt.NDArray[Any], model: str = "ask") -> Any:
    """Has `ask` ask another model."""
    named = np.array([target.encode()], dtype=np.object_)
    result = client.infer(model, [tensor("MODEL", named), tensor("INPUT0", array)])
    return result.as_numpy("OUTPUT0")


def infer_error(call: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """The status and the text with which a client's call fails."""
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **options)
    return str(caught.value.status()), str(caught.value.message())


def kill_stub(host: RunningHost, command: str, **options: Any) -> None:
    """Sends a command that ends a stub of `misbehave`, and waits for the next one."""
    restarts = host.output.count("] restarted")
    with host.client() as client:
        _, text = infer_error(run_command, client, command, **options)
    assert "while it ran this request" in text, text
    wait_until(lambda: host.output.count("] restarted") > restarts, "a restart")


def send_command(client: Client, text: str, model: str = "script") -> Any:
    """Sends a command without waiting for the response; the returned call has `cancel()`."""
    given = tensor("COMMAND", np.array([text.encode()], dtype=np.object_))
    return client.async_infer(model, [given], lambda result, error: None)


class InferStream:
    """One `ModelStreamInfer` stream: sends requests, reads responses in order of arrival."""

    def __init__(self, host: RunningHost, **options: Any) -> None:
        self._client = host.client()
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(
            lambda result, error: self._answers.put((result, error)), **options
        )

    def send(self, text: str, model: str = "stream", **options: Any) -> None:
        """Sends a command."""
        array = np.array([text.encode()], dtype=np.object_)
        self.send_inputs(model, tensor("COMMAND", array), **options)

    def send_inputs(self, model: str, *inputs: grpcclient.InferInput, **options: Any) -> None:
        """Sends a request with these inputs."""
        self._client.async_stream_infer(model, list(inputs), **options)

    def next(self) -> Any:
        """The next result; an error is raised."""
        result, error = self._answers.get(timeout=DEADLINE)
        if error is not None:
            raise error
        return result

    def read_numbers(self) -> list[int]:
        """The numbers of all responses up to the last one, which may be empty."""
        found: list[int] = []
        while True:
            result = self.next()
            number = result.as_numpy("NUMBER")
            if number is not None:
                found.append(int(number[0]))
            if is_final(result):
                return found

    def cancel(self) -> None:
        """Breaks the stream off."""
        self._client.stop_stream(cancel_requests=True)

    def __enter__(self) -> InferStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()
        self._client.close()


def is_final(result: Any) -> bool:
    """Whether a result of a stream is its request's last one."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def run_script(client: Client, source: str, model: str = "script", **options: Any) -> Any:
    """Runs this source in `script`, and returns its result."""
    array = np.array([source.encode()], dtype=np.object_)
    result = client.infer(model, [tensor("COMMAND", array)], **options)
    return json.loads(result.as_numpy("ANSWER")[0])


def check_binary_outputs(url: str) -> None:
    """Checks which responses of `identity` are binary, at the URL of an HTTP server.

    `binary_data` of an output has precedence over `binary_data_output` of its request.
    """
    for output_says, request_says, binary in (
        (None, None, False),
        (None, False, False),
        (None, True, True),
        (False, None, False),
        (False, False, False),
        (False, True, False),
        (True, None, True),
        (True, False, True),
        (True, True, True),
    ):
        output = {} if output_says is None else {"binary_data": output_says}
        parameters = {} if request_says is None else {"binary_data_output": request_says}
        message = {
            "inputs": [{"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [1]}],
            "outputs": [{"name": "OUTPUT0", "parameters": output}],
            "parameters": parameters,
        }
        sent = urllib.request.Request(
            f"{url}/v2/models/identity/infer", json.dumps(message).encode(), method="POST"
        )
        with urllib.request.urlopen(sent, timeout=DEADLINE) as response:
            body = response.read()
            length = response.headers.get("Inference-Header-Content-Length")
        assert (length is not None) == binary, (output, parameters, body)
        if binary:
            assert body[int(length) :] == np.ones(1, np.float32).tobytes()
        else:
            assert json.loads(body)["outputs"][0]["data"] == [1.0]
