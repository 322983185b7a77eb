"""Models that the first request loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.clients import (
    InferStream,
    infer_error,
    infer_through,
    run_command,
    send_command,
    tensor,
)
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.control_models import CONFIG, JSON, index, model
from tests.integration.ensemble_models import CHAIN
from tests.integration.on_demand_models import ON_DEMAND, gated, metric, parameter, waiting
from tests.openai_models import add_models, complete, send

UNLOADED = [("", "UNAVAILABLE", "unloaded")]
READY = [("1", "READY", "")]


@pytest.fixture
def host(repository: RepositoryBuilder, serve: Serve) -> Iterator[RunningHost]:
    """A host that has models of every kind on disk, and loads none at its start."""
    add_models(repository)
    repository.copy("ask", "stream")
    repository.add("x", model("x"), CONFIG)
    repository.add("chain", config=CHAIN)
    yield serve(repository, ON_DEMAND).wait_started()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that does not exist yet."""
    return tmp_path / "gate"


def error_of(host: RunningHost, name: str, **options: object) -> tuple[str, str]:
    with host.client() as client:
        return infer_error(run_command, client, "name", name, **options)


# Which request loads a model


def test_the_first_request_loads_the_model(host: RunningHost) -> None:
    with host.client() as client:
        assert index(client, "x") == UNLOADED
        assert not client.is_model_ready("x")
        assert client.is_server_ready()
        assert index(client, "x") == UNLOADED
        assert run_command(client, "name", "x") == "x"
        assert index(client, "x") == READY
        assert client.is_model_ready("x")
        pid = run_command(client, "pid", "x")
        assert run_command(client, "pid", "x") == pid
    assert metric(host, "pbhost_on_demand_loads_total", model="x", result="success") == 1
    assert metric(host, "pbhost_on_demand_requests_total", model="x") == 1
    assert metric(host, "pbhost_on_demand_wait_seconds_total", model="x") > 0
    assert waiting(host) == 0


def test_metadata_and_configuration_do_not_load_a_model(host: RunningHost) -> None:
    with host.client() as client:
        for call in (client.get_model_metadata, client.get_model_config):
            status, text = infer_error(call, "x")
            assert status == "StatusCode.NOT_FOUND"
            assert text == "Request for unknown model: 'x' is not found"
        assert index(client, "x") == UNLOADED


def test_an_unloaded_model_is_loaded_again(host: RunningHost) -> None:
    with host.client() as client:
        pid = run_command(client, "pid", "x")
        client.unload_model("x")
        wait_until(
            lambda: index(client, "x") == [("1", "UNAVAILABLE", "unloaded")], "the model to unload"
        )
        assert client.is_server_ready()
        assert run_command(client, "pid", "x") != pid


def test_an_http_request_loads_its_model(host: RunningHost) -> None:
    with httpclient.InferenceServerClient(host.http_url, network_timeout=DEADLINE) as client:
        given = httpclient.InferInput("COMMAND", [1], "BYTES")
        given.set_data_from_numpy(np.array([b"name"], dtype=np.object_))
        assert client.infer("x", [given]).as_numpy("ANSWER").tolist() == [b"x"]


def test_a_generate_request_loads_its_model(host: RunningHost) -> None:
    reply = send(host, "POST", "/v2/models/x/generate", {"COMMAND": "name"})
    assert (reply.status, reply.json["ANSWER"]) == (200, "x")


@pytest.mark.parametrize("name", ["letters", "letters:1"])
def test_a_completion_loads_its_model(host: RunningHost, name: str) -> None:
    reply = complete(host, "a|b", model=name)
    assert reply.status == 200, reply.body
    assert reply.json["choices"][0]["text"] == "ab"
    assert complete(host, "a", model="absent").status == 404


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_command_that_sends_a_request_loads_its_model(
    host: RunningHost, protocol: str, repository: RepositoryBuilder
) -> None:
    url = f"http://{host.http_url}" if protocol == "http" else f"grpc://{host.url}"

    def infer(model: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pbhost", "infer", url, model, "--input=COMMAND=name"],
            capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip

    repository.add("broken", "raise ValueError('no')", CONFIG)
    done = infer("x")
    assert (done.returncode, done.stderr) == (0, "")
    assert "['x']" in done.stdout
    unknown = infer("absent")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("pbhost infer: Request for unknown model: 'absent'")
    assert "failed to load 'broken'" in infer("broken").stderr


def test_a_stream_loads_models_and_keeps_the_order(host: RunningHost) -> None:
    with InferStream(host) as stream:
        stream.send("name", "x")
        stream.send("name", "x")
        stream.send("many=2 last", "stream")
        for _ in range(2):
            assert stream.next().as_numpy("ANSWER").tolist() == [b"x"]
        assert stream.read_numbers() == [0, 1, 2]


def test_a_model_that_another_one_calls_is_loaded(host: RunningHost) -> None:
    array = np.arange(5, dtype=np.float32)
    with host.client() as client:
        np.testing.assert_array_equal(infer_through(client, "identity", array), array)
        _, text = infer_error(infer_through, client, "absent", array)
        assert text.endswith("Request for unknown model: 'absent' is not found")


def test_an_ensemble_is_loaded_with_its_steps(host: RunningHost) -> None:
    array = np.arange(5, dtype=np.float32)
    with host.client() as client:
        result = client.infer("chain", [tensor("INPUT0", array)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
        assert index(client, "identity") == READY


def test_large_inputs_wait_for_their_model(host: RunningHost) -> None:
    array = np.arange(3_000_000, dtype=np.float32)
    with host.client() as client:
        result = client.infer("identity", [tensor("INPUT0", array)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_requests_for_unknown_models_and_versions_fail_as_ever(host: RunningHost) -> None:
    unknown = "Request for unknown model: 'absent' is not found"
    assert error_of(host, "absent") == ("StatusCode.NOT_FOUND", unknown)
    with host.client() as client:
        run_command(client, "name", "x")
    assert error_of(host, "x", model_version="7") == (
        "StatusCode.NOT_FOUND",
        "Request for unknown model: 'x' version 7 is not found",
    )


def test_a_load_on_demand_keeps_what_a_client_has_uploaded(host: RunningHost) -> None:
    with host.client() as client:
        client.load_model("x", config=JSON, files={"file:1/model.py": model("up").encode()})
        assert run_command(client, "name", "x") == "up"


# Waiting


def test_all_requests_that_wait_share_one_load(
    repository: RepositoryBuilder, serve: Serve, gate: Path
) -> None:
    repository.add("slow", gated("slow", gate), CONFIG)
    repository.add("x", model("x"), CONFIG)
    host = serve(repository, ON_DEMAND).wait_started()

    def ask(_: int) -> str:
        with host.client() as client:
            return run_command(client, "pid", "slow")

    with ThreadPoolExecutor(8) as pool, host.client() as client:
        answers = pool.map(ask, range(8))
        wait_until(lambda: waiting(host) == 8, "the requests to wait", state=lambda: host.output)
        wait_until(
            lambda: [state for _, state, _ in index(client, "slow")] == ["LOADING"], "the load"
        )
        assert client.is_server_ready()  # the others can be asked
        assert run_command(client, "name", "x") == "x"
        gate.touch()
        assert len(set(answers)) == 1
    assert host.output.count("begins to load slow") == 1
    assert metric(host, "pbhost_on_demand_loads_total", model="slow", result="success") == 1
    assert metric(host, "pbhost_on_demand_requests_total", model="slow") == 8


def test_the_error_of_a_load_is_told_to_each_request_that_waits(
    repository: RepositoryBuilder, serve: Serve, gate: Path
) -> None:
    fails = "raise ValueError('no weights')"
    directory = repository.add("slow", gated("slow", gate, fails), CONFIG)
    host = serve(repository, ON_DEMAND).wait_started()
    with ThreadPoolExecutor(4) as pool, host.client() as client:
        errors = pool.map(lambda _: error_of(host, "slow"), range(4))
        wait_until(lambda: waiting(host) == 4, "the requests to wait", state=lambda: host.output)
        gate.touch()
        for status, text in errors:
            assert status == "StatusCode.UNAVAILABLE"
            assert text.startswith("failed to load 'slow': version 1 is at UNAVAILABLE state:")
            assert "no weights" in text
        assert host.output.count("begins to load slow") == 1
        assert client.is_server_ready()
        repository.write(directory / "1" / "model.py", model("slow"))
        assert run_command(client, "name", "slow") == "slow"
    assert metric(host, "pbhost_on_demand_loads_total", model="slow", result="failure") == 1


def test_a_client_whose_deadline_passes_leaves_and_the_load_goes_on(
    repository: RepositoryBuilder, serve: Serve, gate: Path
) -> None:
    repository.add("slow", gated("slow", gate), CONFIG)
    host = serve(repository, ON_DEMAND).wait_started()
    status, _ = error_of(host, "slow", client_timeout=0.5)
    assert status == "StatusCode.DEADLINE_EXCEEDED"
    with host.client() as client:
        call = send_command(client, "pid", "slow")
        wait_until(lambda: waiting(host) == 1, "the request to wait", state=lambda: host.output)
        call.cancel()
        wait_until(lambda: waiting(host) == 0, "the request to leave", state=lambda: host.output)
        gate.touch()
        assert run_command(client, "name", "slow") == "slow"
    assert host.output.count("begins to load slow") == 1


def test_an_http_client_that_disconnects_leaves(
    repository: RepositoryBuilder, serve: Serve, gate: Path
) -> None:
    repository.add("slow", gated("slow", gate), CONFIG)
    host = serve(repository, ON_DEMAND).wait_started()
    body = json.dumps({"COMMAND": "name"})
    with closing(HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request("POST", "/v2/models/slow/generate", body)
        wait_until(lambda: waiting(host) == 1, "the request to wait", state=lambda: host.output)
    wait_until(lambda: waiting(host) == 0, "the request to leave", state=lambda: host.output)
    gate.touch()


def test_a_request_waits_at_most_as_long_as_the_flag_says(
    repository: RepositoryBuilder, serve: Serve, gate: Path
) -> None:
    repository.add("slow", gated("slow", gate), CONFIG)
    host = serve(repository, ON_DEMAND, "--on-demand-timeout-secs=0.5").wait_started()
    assert error_of(host, "slow") == (
        "StatusCode.UNAVAILABLE",
        "model 'slow' did not load within 0.5 s; loading continues",
    )
    gate.touch()


def test_the_timeout_of_the_queue_policy_counts_for_the_wait(
    repository: RepositoryBuilder, serve: Serve, gate: Path
) -> None:
    policy = """
        max_batch_size: 0
        dynamic_batching { default_queue_policy {
            default_timeout_microseconds: 500000 allow_timeout_override: true } }
    """
    repository.add("slow", gated("slow", gate), CONFIG + policy)
    host = serve(repository, ON_DEMAND).wait_started()
    expired = ("StatusCode.UNAVAILABLE", "Request timeout expired")
    assert error_of(host, "slow") == expired
    assert error_of(host, "slow", timeout=1000) == expired
    gate.touch()


def test_the_server_stops_while_requests_wait(
    repository: RepositoryBuilder, serve: Serve, gate: Path
) -> None:
    repository.add("slow", gated("slow", gate), CONFIG)
    host = serve(repository, ON_DEMAND, "--exit-timeout-secs=1").wait_started()
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(error_of, host, "slow")
        wait_until(lambda: waiting(host) == 1, "the request to wait", state=lambda: host.output)
        host.stop()
        assert error.result(DEADLINE)[0] in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")


# Flags and parameters


def test_a_model_may_load_on_demand_in_other_modes(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("x", model("x"), CONFIG + parameter("LOAD_ON_DEMAND", "yes"))
    repository.add("y", model("y"), CONFIG)
    host = serve(repository).wait_started()
    with host.client() as client:
        assert not client.is_model_ready("x") and client.is_model_ready("y")
        assert client.is_server_ready()
        assert run_command(client, "name", "x") == "x"


def test_the_poller_leaves_a_model_that_loads_on_demand_to_requests(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("x", model("x"), CONFIG + parameter("LOAD_ON_DEMAND", "yes"))
    host = serve(repository, "--model-control-mode=poll", "--repository-poll-secs=1").wait_started()
    with host.client() as client:
        repository.add("y", model("y"), CONFIG)  # the poller has looked when it is there
        wait_until(lambda: client.is_model_ready("y"), "the new model")
        assert not client.is_model_ready("x")
        assert run_command(client, "name", "x") == "x"
        shutil.rmtree(repository.path / "x")
        wait_until(lambda: not client.is_model_ready("x"), "the model to go")


def test_a_model_may_load_at_the_start_in_mode_on_demand(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("w", model("w"), CONFIG)
    repository.add("x", model("x"), CONFIG)
    repository.add("y", model("y"), CONFIG + parameter("LOAD_ON_DEMAND", "no"))
    host = serve(repository, ON_DEMAND, "--load-model=x").wait_started()
    with host.client() as client:
        assert [client.is_model_ready(name) for name in "wxy"] == [False, True, True]
        client.unload_model("y")
        wait_until(lambda: not client.is_model_ready("y"), "the model to unload")
        status, text = infer_error(run_command, client, "name", "y")
        assert status == "StatusCode.NOT_FOUND"
        assert text == "Request for unknown model: 'y' has no available versions"
    host.wait_for("MODE_ON_DEMAND")


def test_a_wrong_parameter_fails_the_load(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.add("x", model("x"), CONFIG + parameter("LOAD_ON_DEMAND", "sometimes"))
    serve(repository, "--exit-on-error=false").wait_for(
        "parameter 'LOAD_ON_DEMAND' of model 'x' must be 'yes' or 'no', got 'sometimes'"
    )
