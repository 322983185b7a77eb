"""What clients see while the models of a server are loading."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.clients import infer_error, kill_stub, run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.imported_modules import imported_by
from tests.pythons import EVALUATES
from tests.waiting import UNTIL_SOURCE
from tests.working_directory import without_directory

LISTENING = (
    r"listening: GRPCInferenceService at \S+:(\d+), HTTPService at \S+:(\d+), Metrics Service at"
    r" \S+:(\d+); requests are refused until the models are loaded"
)


class LoadingHost:
    """A host one of whose models loads until it may `go` on; the other one is loaded."""

    def __init__(self, repository: RepositoryBuilder, serve: Serve, folder: Path) -> None:
        self.go = folder / "go"
        repository.copy("identity")
        repository.add(
            "slow",
            UNTIL_SOURCE + "import os\n"
            "class TritonPythonModel:\n"
            "    def initialize(self, args):\n"
            f"        until(lambda: os.path.exists({str(self.go)!r}), 'the word to continue')\n"
            "    def execute(self, requests):\n"
            "        raise ValueError\n",
            "input { name: 'X' data_type: TYPE_FP32 dims: 1 }\n"
            "output { name: 'Y' data_type: TYPE_FP32 dims: 1 }\n",
        )
        self.host: RunningHost = serve(repository)
        ports = self.host.wait_for(LISTENING).groups()
        self.grpc, self.http, self.metrics = (f"127.0.0.1:{port}" for port in ports)

    def get(self, path: str) -> requests.Response:
        return requests.get(f"http://{self.http}{path}", timeout=DEADLINE)

    def post(self, path: str, body: Any) -> requests.Response:
        return requests.post(f"http://{self.http}{path}", json=body, timeout=DEADLINE)


@pytest.fixture
def loading(repository: RepositoryBuilder, serve: Serve, tmp_path: Path) -> Iterator[LoadingHost]:
    made = LoadingHost(repository, serve, tmp_path)
    yield made
    made.go.touch()


def test_health_is_answered_while_models_load(loading: LoadingHost) -> None:
    with grpcclient.InferenceServerClient(loading.grpc) as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        assert loading.get("/v2/health/live").status_code == 200
        assert loading.get("/v2/health/ready").status_code == 400
        assert loading.get("/health").status_code == 503
        channel = grpc.insecure_channel(loading.grpc)
        check = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        assert check(b"", timeout=DEADLINE) == b"\x08\x02"  # NOT_SERVING
        channel.close()
        assert requests.get(f"http://{loading.metrics}/metrics", timeout=DEADLINE).ok
        loading.go.touch()
        loading.host.wait_started()
        assert client.is_server_ready()
        assert loading.get("/health").status_code == 200
        client.infer("identity", [tensor("INPUT0", np.ones(1, np.float32))])


def test_requests_are_refused_while_models_load(loading: LoadingHost) -> None:
    """Also those to models that are loaded already, as in what the server says of itself."""
    with grpcclient.InferenceServerClient(loading.grpc) as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.infer("identity", [tensor("INPUT0", np.ones(1, np.float32))]),
            lambda: client.get_model_metadata("identity"),
            lambda: client.get_model_config("identity"),
            lambda: client.load_model("identity"),
            lambda: client.unload_model("identity"),
            client.get_model_repository_index,
            client.get_inference_statistics,
        ]
        for refused in calls:
            with pytest.raises(InferenceServerException) as caught:
                refused()
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
            assert caught.value.message() == "Server not ready"
    array = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}
    for answer in (
        loading.post("/v2/models/identity/infer", {"inputs": [array]}),
        loading.post("/v2/models/identity/generate", {"INPUT0": 1}),
        loading.get("/v2/models/identity"),
        loading.get("/v2/models/identity/config"),
    ):
        assert (answer.status_code, answer.json()) == (503, {"error": "Server not ready"})
    chat = loading.post("/v1/completions", {"model": "identity", "prompt": "x"})
    assert (chat.status_code, chat.json()["error"]["message"]) == (503, "Server not ready")
    assert loading.get("/docs").ok


def test_a_server_that_is_stopped_while_models_load_ends_in_order(loading: LoadingHost) -> None:
    loading.host.process.send_signal(signal.SIGTERM)
    assert loading.host.process.wait(DEADLINE) == 0
    with pytest.raises(requests.ConnectionError):
        loading.get("/v2/health/live")


def test_a_port_in_use_is_told_before_models_load(
    loading: LoadingHost, repository: RepositoryBuilder, serve: Serve
) -> None:
    port = loading.http.rpartition(":")[2]
    second = serve(repository, f"--http-port={port}")
    assert second.process.wait(DEADLINE) == 1
    assert "loading:" not in second.output


def test_a_server_starts_without_libraries_that_only_some_requests_need() -> None:
    late = {"prometheus_client", "importlib.metadata", "jinja2", "redis"}
    assert imported_by("import host.cli.serve", late) == set()
    assert imported_by("import host.cli.serve, jinja2", late) == {"jinja2"}


def test_a_server_without_its_repository_runs_and_is_not_live_if_errors_do_not_end_it(
    tmp_path: Path, serve: Serve
) -> None:
    missing = tmp_path / "missing"
    host = serve(missing, "--exit-on-error=false", "--strict-readiness=false")
    host.wait_started()
    assert (
        f"Internal: failed to stat file {missing}. The server has no models and is not live; create"
        " the directory, or change --model-repository, and start the server again"
    ) in host.output
    with host.client() as client:
        assert not client.is_server_live()
        assert not client.is_server_ready()
        assert client.get_server_metadata().name == "triton"
        expected = ("StatusCode.UNAVAILABLE", "Server not ready")
        assert infer_error(client.get_model_repository_index) == expected
        assert infer_error(client.get_model_metadata, "identity") == expected
    assert host.stop() == 0


@pytest.mark.parametrize("stub_start", ["fork", "spawn"])
def test_a_server_whose_working_directory_is_gone_starts_and_serves(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, stub_start: str
) -> None:
    repository.add("model", EVALUATES)
    host = serve(
        repository,
        f"--stub-start={stub_start}",
        "--grpc-engine=h2",
        "--frontend-processes=1",
        under=without_directory(tmp_path),
    ).wait_started()
    with host.client() as client:
        assert run_command(client, "1 + 1", "model") == "2"
        _, text = infer_error(run_command, client, "1 / 0", "model")
        assert "ZeroDivisionError: division by zero" in text
        assert "<string>(1): <module>" in text
        kill_stub(host, "os.kill(os.getpid(), 9)", model="model")
        assert run_command(client, "1 + 1", "model") == "2"
    assert host.stop() == 0
