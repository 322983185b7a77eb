"""Models that have a say in whether they are ready: `is_ready`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.clients import Client, infer_error, infer_through, run_command
from tests.conftest import RepositoryBuilder, RunningHost, Serve

MODEL = """
import asyncio, threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.said = True
        self.calls = 0
        self.go = threading.Event()

    def execute(self, requests):
        responses = []
        for request in requests:
            text = request.inputs()[0].as_numpy()[0].decode()
            if text == "go":
                self.go.set()
            else:
                self.said = eval(text)
            array = np.array([str(self.calls).encode()], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)]))
        return responses

    {define} is_ready(self):
        self.calls += 1
        if self.said == "waits":
            self.go.wait()
            return True
        if isinstance(self.said, Exception):
            raise self.said
        return self.said
"""
CONFIG = """
backend: "python"
input [ { name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    for name, define in (("plain", "def"), ("coroutine", "async def")):
        module_repository.add(name, MODEL.replace("{define}", define), CONFIG)
    module_repository.add("slow", MODEL.replace("{define}", "def"), CONFIG)
    module_repository.copy("identity", "ask")
    return module_serve(module_repository, "--log-verbose=1").wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


@pytest.mark.parametrize("model", ["plain", "coroutine"])
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("False", r"Model '{}_0' is not ready \(user-defined check failed\)."),
        ("ValueError('no database')", "ValueError: no database"),
        ("1", r"is_ready\(\) must return a boolean value"),
        ("'ready'", r"is_ready\(\) must return a boolean value"),
        ("None", r"is_ready\(\) must return a boolean value"),
        ("np.bool_(True)", r"is_ready\(\) must return a boolean value"),
    ],
)
def test_a_model_that_says_no_is_not_ready_and_still_serves(
    host: RunningHost, client: Client, model: str, said: str, reason: str
) -> None:
    run_command(client, said, model)
    assert not client.is_model_ready(model)
    assert not client.is_server_ready()
    host.wait_for(f"Model '{model}' version 1 is not ready: {reason.format(model)}")
    run_command(client, "True", model)
    assert client.is_model_ready(model)
    assert client.is_server_ready()


def test_a_model_without_a_say_is_ready_while_its_process_lives(client: Client) -> None:
    assert client.is_model_ready("identity")


def test_models_do_not_call_a_model_that_is_not_ready(client: Client) -> None:
    """Clients may, models may not (BLS): as in Triton."""
    run_command(client, "False", "plain")
    _, text = infer_error(infer_through, client, "plain", np.ones(1, dtype=np.float32))
    assert text == (
        "Model plain - Error when running inference: Failed for execute the inference request."
        " Model 'plain' is not ready."
    )
    run_command(client, "True", "plain")
    _, text = infer_error(infer_through, client, "plain", np.ones(1, dtype=np.float32))
    assert "unexpected inference output 'OUTPUT0' for model 'plain'" in text


def test_a_slow_is_ready_times_out_and_the_next_query_joins_it(
    host: RunningHost, client: Client
) -> None:
    before = int(run_command(client, "'waits'", "slow"))
    assert not client.is_model_ready("slow")
    host.wait_for("Timed out waiting for user-defined is_ready\\(\\) response")
    calls = run_command(client, "go", "slow")
    assert client.is_model_ready("slow")
    assert int(calls) == before + 1
