"""The infer endpoint gives the same responses on the fast path and in a task."""

from __future__ import annotations

import http.client
import json
import struct
from contextlib import closing
from typing import Any

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
"""
DOUBLING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if x[0, 0] < 0:
                answers.append(pb_utils.InferenceResponse([], pb_utils.TritonError("negative")))
            else:
                outputs = [pb_utils.Tensor("Y", 2 * x)]
                answers.append(pb_utils.InferenceResponse(outputs, parameters={"a": 1}))
        return answers
"""

NUMBERS = struct.pack("<2f", 1.5, 2.5)
BINARY = {"name": "X", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
PLAIN = {"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.5]}
BINARY_OUTPUTS: dict[str, Any] = {"parameters": {"binary_data_output": True}}
CLASSES = [{"name": "Y", "parameters": {"classification": 2}}]


def _body(data: bytes = NUMBERS, **members: Any) -> tuple[bytes, dict[str, str]]:
    """Returns a body with binary data, and the header with the length of its JSON part."""
    text = json.dumps({"inputs": [BINARY], **members}).encode()
    return text + data, {"Inference-Header-Content-Length": str(len(text))}


REQUESTS: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "binary": ("doubling", *_body(**BINARY_OUTPUTS)),
    "json answer": ("doubling", *_body()),
    "json": ("doubling", json.dumps({"inputs": [PLAIN]}).encode(), {}),
    "id": ("doubling", *_body(id="seven", **BINARY_OUTPUTS)),
    "version": ("doubling/versions/1", *_body()),
    "no such version": ("doubling/versions/9", *_body()),
    "version that is no number": ("doubling/versions/" + "9" * 30, *_body()),
    "no such model": ("tripling", *_body()),
    "decoupled": ("stream", *_body()),
    "classes": ("doubling", *_body(outputs=CLASSES)),
    "listed output": ("doubling", *_body(outputs=[{"name": "Y"}], **BINARY_OUTPUTS)),
    "classes as bytes": ("doubling", *_body(outputs=CLASSES, **BINARY_OUTPUTS)),
    "no such output": ("doubling", *_body(outputs=[{"name": "Z"}])),
    "parameters": ("doubling", *_body(parameters={"priority": 1, "mine": "x"})),
    "error of the model": ("doubling", *_body(struct.pack("<2f", -1.0, 0.0))),
    "too few bytes": ("doubling", *_body(b"1234")),
    "too many bytes": ("doubling", *_body(NUMBERS + b"1234")),
    "wrong shape": ("doubling", *_body(inputs=[{**PLAIN, "shape": [2, 2]}])),
    "wrong name": ("doubling", *_body(inputs=[{**BINARY, "name": "W"}])),
    "wrong datatype": ("doubling", *_body(inputs=[{**BINARY, "datatype": "INT32"}])),
    "broken json": ("doubling", b'{"inputs":', {}),
    "raw": ("doubling", NUMBERS, {"Inference-Header-Content-Length": "0"}),
    "head beyond the body": ("doubling", b"{}", {"Inference-Header-Content-Length": "9"}),
    "head that is no number": ("doubling", b"{}", {"Inference-Header-Content-Length": "x"}),
    "gzip": ("doubling", _body()[0], {**_body()[1], "Accept-Encoding": "gzip"}),
    "unknown coding": ("doubling", _body()[0], {**_body()[1], "Content-Encoding": "br"}),
}


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("stream")
    module_repository.add("doubling", DOUBLING, CONFIG, files={"labels.txt": "zero\none\n"})
    return module_serve(module_repository).wait_started()


@pytest.mark.parametrize("name", REQUESTS)
def test_the_fast_path_answers_like_the_task_path(host: RunningHost, name: str) -> None:
    model, body, headers = REQUESTS[name]
    answers = []
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        # A head of more than 2 kB is not cached. Of the two short heads, the second one is
        # recognised.
        for long in ("x" * 3000, "", ""):
            connection.request(
                "POST", f"/v2/models/{model}/infer", body, {**headers, "x-long": long}
            )
            response = connection.getresponse()
            answers.append((response.status, response.getheaders(), response.read()))
    assert answers[0] == answers[1] == answers[2]


def test_fast_path_requests_are_counted_as_open(host: RunningHost) -> None:
    def count() -> int:
        path = "/v2/models/doubling/stats"
        with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
            connection.request("GET", path)
            stats = json.loads(connection.getresponse().read())["model_stats"][0]
        return int(stats["inference_stats"]["success"]["count"])

    before = count()
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        for _ in range(3):
            connection.request("POST", "/v2/models/doubling/infer", *_body())
            connection.getresponse().read()
    assert count() == before + 3
