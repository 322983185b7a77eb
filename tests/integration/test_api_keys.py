"""API keys on a real host: who may ask what, and how much, on every endpoint."""

from __future__ import annotations

import base64
import hashlib
import json
import queue
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.clients import InferStream, infer_error, run_command, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.control_models import CONFIG
from tests.integration.on_demand_models import gated, metric
from tests.openai_models import Reply, add_models, send

HASHED = hashlib.sha256(b"hashed-key").hexdigest()
KEYS = f"""
all all-models-key
hashed sha256:{HASHED}
limited limited-key models=misb*,letters allow=inference,model-repository,statistics,metadata
ops ops-admin-key allow=all
reader log-reader-key models=misbehave allow=logging
slow slow-rate-key rate=0.01 burst=2
one one-at-a-time concurrency=1
once once-only-key rate=0.001 burst=1
"""
SECRETS = re.findall(r"\S+-\S+-\S+|\S+-key\b", KEYS)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module", params=["h2", "grpcio"])
def host(
    request: pytest.FixtureRequest, module_serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> RunningHost:
    folder = tmp_path_factory.mktemp("served")
    repository = RepositoryBuilder(folder / "repository")
    for name in ("misbehave", "script", "stream"):
        repository.copy(name)
    add_models(repository)
    keys = folder / "keys"
    keys.write_text(KEYS)
    return module_serve(
        repository,
        f"--api-key-file={keys}",
        f"--grpc-engine={request.param}",
        "--log-verbose=1",
        "--model-control-mode=explicit",
        "--load-model=*",
    ).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[grpcclient.InferenceServerClient]:
    with host.client() as client:
        yield client


def infer(host: RunningHost, key: str, model: str = "misbehave", text: str = "echo x") -> Reply:
    body = {"inputs": [{"name": "COMMAND", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    return send(host, "POST", f"/v2/models/{model}/infer", body, bearer(key))


class RpcFailure(NamedTuple):
    """How a unary call failed; `retry_ms` is in the trailing metadata."""

    code: grpc.StatusCode
    details: str
    retry_ms: int


def rpc_failure(call: Callable[..., Any], *arguments: Any, **options: Any) -> RpcFailure:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **options)
    assert isinstance(caught.value.__context__, grpc.RpcError)
    error: Any = caught.value.__context__
    trailers = dict(error.trailing_metadata())
    return RpcFailure(error.code(), error.details(), int(trailers["grpc-retry-pushback-ms"]))


def stream_trailers(host: RunningHost, key: str, model: str) -> dict[str, Any]:
    """The trailing metadata of a stream with one request."""
    request = service_pb2.ModelInferRequest(model_name=model)
    given = request.inputs.add(name="COMMAND", datatype="BYTES", shape=[1])
    given.contents.bytes_contents.append(b"last")
    with grpc.insecure_channel(host.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request]), metadata=list(bearer(key).items()))
        assert len(list(call)) == 1
        return dict(call.trailing_metadata())


def refused(host: RunningHost, client: str, reason: str) -> float:
    """The metric of refused requests."""
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as page:
        text = page.read().decode()
    name = "pbhost_client_refused_requests_total"
    found = re.search(rf'{name}{{client="{client}",reason="{reason}"}} (\S+)', text)
    return float(found[1]) if found else 0.0


def test_a_request_without_a_known_key_is_refused(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    missing = "this server needs an API key: Authorization: Bearer KEY"
    for headers, text in (
        (None, missing),
        ({"authorization": "Bearer"}, missing),
        ({"authorization": "Basic !"}, missing),
        (bearer("unknown-key"), "unknown API key"),
        (bearer(HASHED), "unknown API key"),
    ):
        expected = ("StatusCode.UNAUTHENTICATED", text)
        assert infer_error(run_command, client, "echo x", headers=headers) == expected
        assert infer_error(client.get_server_metadata, headers=headers) == expected
        assert infer_error(client.get_model_repository_index, headers=headers) == expected
        for method, path in (
            ("GET", "/v2"),
            ("POST", "/v2/models/misbehave/infer"),
            ("POST", "/v2/models/letters/generate_stream"),
            ("POST", "/v2/repository/index"),
            ("GET", "/openapi.json"),
        ):
            reply = send(host, method, path, headers=headers)
            assert (reply.status, reply.json) == (401, {"error": text})
            assert reply.headers["www-authenticate"] == "Bearer"
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
            reply = send(host, method, path, headers=headers)
            assert (reply.status, reply.error["message"]) == (401, text)
            assert reply.error["code"] == "invalid_api_key"


def test_a_stream_without_a_key_is_closed(host: RunningHost) -> None:
    with InferStream(host) as stream, pytest.raises(InferenceServerException) as caught:
        stream.next()
    assert caught.value.status() == "StatusCode.UNAUTHENTICATED"


def test_health_and_the_page_need_no_key(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("misbehave")
    for path in ("/v2/health/live", "/v2/models/misbehave/ready", "/health", "/docs"):
        assert send(host, "GET", path).status == 200


@pytest.mark.parametrize("key", ["all-models-key", "hashed-key"])
def test_a_key_opens_inference_and_what_describes_models(
    host: RunningHost, client: grpcclient.InferenceServerClient, key: str
) -> None:
    assert run_command(client, "echo x", headers=bearer(key)) == "x"
    assert client.get_model_config("misbehave", headers=bearer(key)).config.name == "misbehave"
    assert infer(host, key).json["outputs"][0]["data"] == ["x"]
    with InferStream(host, headers=bearer(key)) as stream:
        stream.send("respond last")
        assert stream.read_numbers() == [0, 1]
    completion = {"model": "letters", "prompt": "a|b"}
    reply = send(host, "POST", "/v1/completions", completion, bearer(key))
    assert reply.json["choices"][0]["text"] == "ab"
    basic = base64.b64encode(f"anybody:{key}".encode()).decode()
    assert send(host, "GET", "/v2", headers={"Authorization": f"Basic {basic}"}).status == 200


def test_a_key_without_the_category_is_refused(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    headers = bearer("all-models-key")
    text = "the key of client 'all' does not allow requests of category '{}'"
    for call, category in (
        (client.get_model_repository_index, "model-repository"),
        (client.get_log_settings, "logging"),
        (client.get_trace_settings, "trace"),
        (client.get_system_shared_memory_status, "shared-memory"),
    ):
        expected = ("StatusCode.PERMISSION_DENIED", text.format(category))
        assert infer_error(call, headers=headers) == expected
        call(headers=bearer("ops-admin-key"))
    before = refused(host, "all", "category")
    for method, path, category in (
        ("POST", "/v2/repository/models/misbehave/unload", "model-repository"),
        ("GET", "/v2/stacks", "logging"),
        ("GET", "/v2/trace/setting", "trace"),
        ("POST", "/v2/systemsharedmemory/unregister", "shared-memory"),
    ):
        reply = send(host, method, path, headers=headers)
        assert (reply.status, reply.json["error"]) == (403, text.format(category))
    reply = send(host, "POST", "/v1/models/letters/unload", headers=headers)
    assert (reply.status, reply.error["code"]) == (403, "permission_denied")
    assert refused(host, "all", "category") == before + 5


def test_a_key_is_for_the_models_that_its_patterns_match(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    key, before = "limited-key", refused(host, "limited", "model")
    headers = bearer(key)
    assert run_command(client, "echo x", headers=headers) == "x"
    assert infer(host, key).status == 200
    text = "the key of client 'limited' does not allow requests to model '{}'"
    denied = "StatusCode.PERMISSION_DENIED"
    for call, name in (
        (lambda **options: run_script(client, "return 1", **options), "script"),
        (lambda **options: client.load_model("agent", **options), "agent"),
        (lambda **options: client.get_model_metadata("absent", **options), "absent"),
    ):
        assert infer_error(call, headers=headers) == (denied, text.format(name))
    name_one = "the key of client 'limited' is for some models only: name a model"
    for call in (client.get_inference_statistics, client.get_model_repository_index):
        assert infer_error(call, headers=headers) == (denied, name_one)
    with InferStream(host, headers=headers) as stream:
        stream.send("last")
        with pytest.raises(InferenceServerException, match="does not allow requests to model"):
            stream.next()
    for method, path in (
        ("POST", "/v2/models/script/infer"),
        ("POST", "/v2/models/agent/generate"),
        ("POST", "/v2/repository/models/agent/unload"),
    ):
        reply = send(host, method, path, headers=headers)
        assert (reply.status, reply.json["error"]) == (403, text.format(path.split("/")[-2]))
    assert send(host, "GET", "/v2/models/stats", headers=headers).json == {"error": name_one}
    listed = send(host, "GET", "/v1/models", headers=headers).json["data"]
    assert {model["id"] for model in listed} == {"letters", "acme/letters"}
    assert send(host, "GET", "/v1/models/agent", headers=headers).status == 403
    chat = {"model": "agent", "messages": [{"role": "user", "content": "x"}]}
    assert send(host, "POST", "/v1/chat/completions", chat, headers).status == 403
    other_name = {"model": "acme/letters", "prompt": "a"}
    assert send(host, "POST", "/v1/completions", other_name, headers).status == 200
    assert refused(host, "limited", "model") == before + 12


def test_a_key_for_some_models_does_not_read_about_others(host: RunningHost) -> None:
    error = {"error": "the key of client 'reader' is for some models only: name a model"}
    for path in ("/v2/stacks", "/v2/crashes", "/v2/quarantine", "/v2/logging/lines"):
        reply = send(host, "GET", path, headers=bearer("log-reader-key"))
        assert (reply.status, reply.json) == (403, error), path
    reply = send(host, "GET", "/v2/models/misbehave/stacks", headers=bearer("log-reader-key"))
    assert reply.status == 200


def test_a_client_above_its_rate_is_told_when_to_retry(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    key = "slow-rate-key"
    while infer(host, key).status == 200:
        pass
    text = r"client 'slow' has sent more than 0.01 requests per second; retry in \S+ s"
    before = refused(host, "slow", "rate")
    failure = rpc_failure(run_command, client, "echo x", headers=bearer(key))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert re.fullmatch(text, failure.details)
    assert 0 < failure.retry_ms <= 100_000
    reply = infer(host, key)
    assert reply.status == 429 and re.fullmatch(text, reply.json["error"])
    assert 0 < int(reply.headers["retry-after"]) <= 100
    reply = send(host, "POST", "/v1/completions", {"model": "letters"}, bearer(key))
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(reply.headers["retry-after-ms"]) <= 100_000
    with InferStream(host, headers=bearer(key)) as stream:
        for _ in range(2):  # the stream continues
            stream.send("last")
            with pytest.raises(InferenceServerException, match="more than 0.01 requests"):
                stream.next()
    sent = stream_trailers(host, key, "stream")
    assert 0 < int(sent["grpc-retry-pushback-ms"]) <= 100_000
    assert "grpc-retry-pushback-ms" not in stream_trailers(host, "all-models-key", "stream")
    assert send(host, "GET", "/v2", headers=bearer(key)).status == 200  # is no inference
    assert refused(host, "slow", "rate") == before + 6


def test_a_refused_request_takes_nothing_of_the_rate_whatever_its_size(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    headers = bearer("once-only-key")
    with grpc.insecure_channel(host.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for model in ("misbehave", "absent"):
            for size in (1, 1 << 17):
                request = service_pb2.ModelInferRequest(model_name=model)
                wrong = request.inputs.add(name="WRONG", datatype="FP32", shape=[size])
                wrong.contents.fp32_contents.extend([0.0] * size)
                options: Any = {"metadata": list(headers.items()), "timeout": DEADLINE}
                with pytest.raises(grpc.RpcError) as caught:
                    stub.ModelInfer(request, **options)
                assert caught.value.code() in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.NOT_FOUND,
                )
                (answer,) = stub.ModelStreamInfer(iter([request]), **options)
                assert "WRONG" in answer.error_message or "absent" in answer.error_message
    assert metric(host, "pbhost_client_requests_total", client="once") == 0
    assert run_command(client, "echo x", headers=headers) == "x"
    assert metric(host, "pbhost_client_requests_total", client="once") == 1
    failure = rpc_failure(run_command, client, "echo x", headers=headers)
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@contextmanager
def occupied(host: RunningHost, key: str) -> Iterator[None]:
    """While open, a client has a request in progress."""
    with InferStream(host, headers=bearer(key)) as stream:
        stream.send_inputs("letters", tensor("prompt", np.array([b"a|WAIT"], dtype=np.object_)))
        stream.next()
        yield


def test_a_client_has_only_so_many_requests_in_progress(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    key = "one-at-a-time"
    text = "client 'one' has 1 requests in progress, and its limit is 1; retry in 1 s"
    with occupied(host, key):
        reply = infer(host, key)
        assert (reply.status, reply.json["error"]) == (429, text)
        assert reply.headers["retry-after"] == "1"
        failure = rpc_failure(run_command, client, "echo x", headers=bearer(key))
        assert failure == (grpc.StatusCode.RESOURCE_EXHAUSTED, text, 1000)
        assert infer(host, "all-models-key").status == 200
    wait_until(lambda: infer(host, key).status == 200, "the request to be counted as ended")
    for _ in range(3):  # each request is counted as ended, also those with an error
        assert run_command(client, "echo x", headers=bearer(key)) == "x"
        assert infer_error(run_command, client, "raises x", headers=bearer(key))[0] == (
            "StatusCode.INTERNAL"
        )
        assert infer_error(run_script, client, "x", "misbehave", headers=bearer(key))
        assert infer(host, key, text="raises x").status == 500
        assert infer(host, key, "absent").status == 404


def test_no_key_is_in_the_log_or_in_metrics(host: RunningHost) -> None:
    infer(host, "all-models-key")
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as page:
        metrics = page.read().decode()
    assert re.search(r'pbhost_client_requests_total{client="all"} [1-9]', metrics)
    assert 'pbhost_client_requests_in_progress{client="one"} 0' in metrics
    assert re.search(r"pbhost_unauthenticated_requests_total [1-9]", metrics)
    assert len(SECRETS) == 7
    for secret in (*SECRETS, HASHED, HASHED[:8]):
        assert secret not in metrics and secret not in host.output


def test_clients_share_the_server_when_there_is_too_much(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    add_models(repository)
    repository.copy("misbehave")
    keys = tmp_path / "keys"
    keys.write_text("greedy greedy-key\nmodest modest-key\n")
    flags = (f"--api-key-file={keys}", "--api-key-max-requests=2")
    host = serve(repository, *flags).wait_started()
    with occupied(host, "greedy-key"), occupied(host, "greedy-key"):
        reply = infer(host, "greedy-key")
        assert reply.status == 429
        assert "its share of the 2 requests" in reply.json["error"]
        assert infer(host, "modest-key").status == 200
        with occupied(host, "modest-key"):
            assert infer(host, "modest-key").status == 429
    assert refused(host, "greedy", "fair_share") == 1


def test_changed_keys_take_effect_and_a_broken_file_keeps_the_old_ones(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    repository.copy("misbehave")
    keys = tmp_path / "keys"
    keys.write_text("alice first-key models=misbehave\n")
    host = serve(repository, f"--api-key-file={keys}").wait_started()
    assert infer(host, "first-key").status == 200
    keys.write_text("alice first-key models=other\nbob second-key\n")
    wait_until(lambda: infer(host, "second-key").status == 200, "the new key")
    assert infer(host, "first-key").status == 403
    host.wait_for(f"read 2 API keys from '{keys}'")

    keys.write_text("bob second-key rate=\n")
    told = "cannot be read again, the old ones stay valid: line 1: rate must be"
    wait_until(lambda: infer(host, "second-key").status == 200 and told in host.output, "the error")
    keys.unlink()
    gone = "No such file"
    wait_until(lambda: infer(host, "second-key").status == 200 and gone in host.output, "the error")
    keys.write_text("bob third-key\n")
    wait_until(lambda: infer(host, "third-key").status == 200, "the third key")
    assert infer(host, "second-key").status == 401
    assert host.output.count(told) == host.output.count(gone) == 1


def test_a_key_file_that_cannot_be_used_stops_the_start(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice first-key rate=fast\n")
    host = serve(repository, f"--api-key-file={keys}")
    host.wait_for(f"failed to read the API keys in '{keys}': line 1: rate must be a number above 0")
    assert host.process.wait(DEADLINE) == 1
    host = serve(repository, f"--api-key-file={keys}", f"--openai-api-key-file={keys}")
    host.wait_for("--openai-api-key-file cannot be used with --api-key-file")
    assert json.dumps(host.process.wait(DEADLINE)) == "1"


def test_a_refused_client_does_not_make_a_model_load(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    add_models(repository)
    repository.copy("misbehave")
    repository.copy("stream")
    keys = tmp_path / "keys"
    keys.write_text("limited limited-key models=misbehave\n")
    flags = ("--model-control-mode=on-demand", f"--api-key-file={keys}")
    host = serve(repository, *flags).wait_started()
    headers = bearer("limited-key")
    for path, body in (
        ("/v2/models/stream/infer", {"inputs": []}),
        ("/v2/models/letters/generate", {"prompt": "a"}),
        ("/v1/completions", {"model": "letters", "prompt": "a"}),
    ):
        assert send(host, "POST", path, body, headers).status == 403
        assert send(host, "POST", path, body).status == 401
    with host.client() as client:
        denied = infer_error(run_command, client, "last", "stream", headers=headers)
        assert denied[0] == "StatusCode.PERMISSION_DENIED"
        assert run_command(client, "echo x", headers=headers) == "x"
    loading = re.findall(r"loading: (\w+):1", host.output)
    assert loading == ["misbehave"]


def test_requests_that_wait_for_a_load_are_in_progress(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    gate, keys = tmp_path / "gate", tmp_path / "keys"
    repository.add("slow", gated("slow", gate), CONFIG)
    keys.write_text("two two-at-a-time concurrency=2\n")
    flags = ("--model-control-mode=on-demand", f"--api-key-file={keys}")
    host = serve(repository, *flags).wait_started()
    headers = bearer("two-at-a-time")

    def in_progress() -> float:
        return metric(host, "pbhost_client_requests_in_progress", client="two")

    text = "client 'two' has 2 requests in progress, and its limit is 2; retry in 1 s"
    answers: queue.Queue[Any] = queue.Queue()
    given = tensor("COMMAND", np.array([b"name"], dtype=np.object_))
    with host.client() as client, InferStream(host, headers=headers) as stream:
        stream.send("name", "slow")
        for _ in range(2):
            call = client.async_infer(
                "slow", [given], lambda result, error: answers.put(result), headers=headers
            )
            wait_until(lambda: in_progress() == 2, "two requests in progress")
            assert rpc_failure(run_command, client, "name", "slow", headers=headers) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                text,
                1000,
            )
            call.cancel()
            assert answers.get(timeout=DEADLINE) is None
            wait_until(lambda: in_progress() == 1, "the end of the cancelled request")
        gate.touch()
        stream.next()
        wait_until(lambda: in_progress() == 0, "the end of all requests")
        for _ in range(3):
            assert run_command(client, "name", "slow", headers=headers) == "slow"
        assert in_progress() == 0


def test_frontend_processes_count_a_request_once_from_its_wait_for_a_load_to_its_end(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    gate, keys = tmp_path / "gate", tmp_path / "keys"
    repository.add("slow", gated("slow", gate), CONFIG)
    names = {"two": 2, "gone": 1, "wrong": 1, "web": 1}
    keys.write_text(
        "".join(f"{name} {name}-of-some rate=0.001 burst={n}\n" for name, n in names.items())
    )
    flags = ("--model-control-mode=on-demand", f"--api-key-file={keys}", "--frontend-processes=1")
    host = serve(repository, *flags).wait_started()
    answers: queue.Queue[Any] = queue.Queue()
    given = tensor("COMMAND", np.array([b"name"], dtype=np.object_))

    def wait_in_progress(name: str, count: int) -> None:
        def reached() -> bool:
            return metric(host, "pbhost_client_requests_in_progress", client=name) == count

        wait_until(reached, f"{count} requests of '{name}' in progress")

    def begin(
        client: grpcclient.InferenceServerClient, name: str, one: grpcclient.InferInput = given
    ) -> Any:
        return client.async_infer(
            "slow",
            [one],
            lambda result, error: answers.put(
                error.status() if error else result.as_numpy("ANSWER")[0].decode()
            ),
            headers=bearer(f"{name}-of-some"),
        )

    with host.client() as client, ThreadPoolExecutor() as threads:
        try:
            for _ in range(4):
                begin(client, "two")
            assert [answers.get(timeout=DEADLINE) for _ in range(2)] == [
                "StatusCode.RESOURCE_EXHAUSTED"
            ] * 2
            wait_in_progress("two", 2)
            for _ in range(2):  # a client that goes away gives back what its request has taken
                call = begin(client, "gone")
                wait_in_progress("gone", 1)
                call.cancel()
                assert answers.get(timeout=DEADLINE) == "StatusCode.CANCELLED"
                wait_in_progress("gone", 0)
            begin(client, "wrong", tensor("WRONG", np.zeros(1, np.float32)))
            wait_in_progress("wrong", 1)
            generate, web = "/v2/models/slow/generate", bearer("web-of-some")
            waits = threads.submit(send, host, "POST", generate, {"COMMAND": "name"}, web)
            wait_in_progress("web", 1)
            assert infer(host, "web-of-some", "slow", "name").status == 429
        finally:
            gate.touch()
        assert waits.result(DEADLINE).status == 200
        given_answers = sorted(answers.get(timeout=DEADLINE) for _ in range(3))
        assert given_answers == ["StatusCode.INVALID_ARGUMENT", "slow", "slow"]
        for name in names:
            wait_in_progress(name, 0)
        assert metric(host, "pbhost_client_requests_total", client="two") == 2
        assert metric(host, "pbhost_client_requests_total", client="web") == 1
        for name, answer in (("two", "StatusCode.RESOURCE_EXHAUSTED"), ("wrong", "slow")):
            begin(client, name)
            assert answers.get(timeout=DEADLINE) == answer
