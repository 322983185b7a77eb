"""The fields `priority` and `timeout` of the OpenAI routes, on a real host."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.conftest import RepositoryBuilder, RunningHost, Serve
from tests.openai_models import chat, complete

TELLER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            told = json.dumps([request.timeout(), json.loads(request.parameters())])
            names = [tensor.name() for tensor in request.inputs()]
            array = np.array([json.dumps({"told": told, "inputs": names}).encode()], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", array)]))
        return responses
"""
TELLER_CONFIG = """
backend: "python"
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "OPENAI" value { string_value: "chat, completions" } }
parameters { key: "OPENAI_CHAT_TEMPLATE" value { string_value: "last" } }
"""


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    module_repository.add("teller", TELLER, TELLER_CONFIG)
    yield module_serve(module_repository).wait_started()


def test_a_timeout_reaches_the_core_in_microseconds(host: RunningHost) -> None:
    for reply in (
        chat(host, "a", model="teller", timeout=9_000_000, priority=0),
        complete(host, "a", model="teller", timeout=9_000_000),
    ):
        choice = reply.json["choices"][0]
        told = json.loads(choice.get("text") or choice["message"]["content"])["told"]
        timeout, parameters = json.loads(told)
        assert timeout == 9_000_000
        assert not {"timeout", "priority"} & set(parameters)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("timeout", "1 s", "invalid_type"),
        ("timeout", 1.5, "invalid_type"),
        ("timeout", -1, "invalid_value"),
        ("priority", True, "invalid_type"),
        ("priority", 1 << 64, "invalid_value"),
    ],
)
def test_wrong_priorities_and_timeouts_are_refused(
    host: RunningHost, field: str, value: object, code: str
) -> None:
    error = complete(host, "a", model="teller", **{field: value}).error
    assert (error["code"], error["param"]) == (code, field)
