"""Requests that need a secret header: which category restricts which request, on every endpoint."""

from __future__ import annotations

import http.client as http_client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb

from tests.clients import infer_error, run_command
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

CATEGORIES = {
    "health": ["ServerLive", "ServerReady", "ModelReady"],
    "metadata": ["ServerMetadata", "ModelMetadata"],
    "inference": ["ModelInfer", "ModelStreamInfer"],
    "shared-memory": [
        f"{kind}SharedMemory{what}"
        for kind in ("System", "Cuda")
        for what in ("Status", "Register", "Unregister")
    ],
    "model-config": ["ModelConfig"],
    "model-repository": ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"],
    "statistics": ["ModelStatistics"],
    "trace": ["TraceSetting"],
    "logging": ["LogSettings"],
    "recording": [],
}
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
RPCS = {rpc: category for category, rpcs in CATEGORIES.items() for rpc in rpcs}


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """Each category has a key of its own."""
    module_repository.copy("misbehave")
    return module_serve(
        module_repository,
        *(f"--grpc-restricted-protocol={name}:key-{name}=of {name}" for name in CATEGORIES),
        *(f"--http-restricted-api={name}:Key-{name}=of {name}" for name in CATEGORIES),
    ).wait_started()


@pytest.fixture(scope="module")
def channel(host: RunningHost) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(host.url) as channel:
        yield channel


def call(channel: grpc.Channel, rpc: str, *metadata: tuple[str, str]) -> str:
    """Asks with an empty message; the details of the failure, "" if there is none."""
    method = SERVICE.methods_by_name[rpc]
    request = GetMessageClass(method.input_type)
    path = f"/{SERVICE.full_name}/{rpc}"
    try:
        if method.client_streaming:
            send_request = channel.stream_stream(path, request.SerializeToString, bytes)
            list(send_request(iter([]), metadata=metadata, timeout=DEADLINE))
        else:
            channel.unary_unary(path, request.SerializeToString, bytes)(
                request(), metadata=metadata, timeout=DEADLINE
            )
    except grpc.RpcError as error:
        restricted = "restricted" in (error.details() or "")
        assert not restricted or error.code() is grpc.StatusCode.UNAVAILABLE
        return str(error.details())
    return ""


def expecting(category: str) -> str:
    return f"This protocol is restricted, expecting header 'triton-grpc-protocol-key-{category}'"


def test_every_rpc_has_a_category() -> None:
    assert set(RPCS) == {method.name for method in SERVICE.methods}


@pytest.mark.parametrize("rpc", RPCS)
def test_an_rpc_needs_the_key_of_its_category(channel: grpc.Channel, rpc: str) -> None:
    category = RPCS[rpc]
    key = f"triton-grpc-protocol-key-{category}"
    assert call(channel, rpc) == expecting(category)
    assert call(channel, rpc, (key, f"of {category}x")) == expecting(category)
    assert call(channel, rpc, (f"key-{category}", f"of {category}")) == expecting(category)
    others = [(f"triton-grpc-protocol-key-{o}", f"of {o}") for o in CATEGORIES if o != category]
    assert call(channel, rpc, *others) == expecting(category)
    assert "restricted" not in call(channel, rpc, (key, f"of {category}"))


def test_the_standard_health_service_is_health(channel: grpc.Channel) -> None:
    check = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
    with pytest.raises(grpc.RpcError) as caught:
        check(b"", timeout=DEADLINE)
    assert caught.value.details() == expecting("health")
    metadata = (("triton-grpc-protocol-key-health", "of health"),)
    assert check(b"", metadata=metadata, timeout=DEADLINE) == b"\x08\x01"


def test_the_first_of_duplicate_keys_counts(channel: grpc.Channel) -> None:
    key = "triton-grpc-protocol-key-metadata"
    right, wrong = (key, "of metadata"), (key, "no")
    assert call(channel, "ServerMetadata", wrong, right) == expecting("metadata")
    assert call(channel, "ServerMetadata", right, wrong) == ""


def test_a_restricted_stream_is_closed_before_anything_is_read(channel: grpc.Channel) -> None:
    """The client never sends, and does not end its side."""
    never = threading.Event()

    def requests() -> Iterator[Any]:
        never.wait(DEADLINE)
        yield from ()

    path = f"/{SERVICE.full_name}/ModelStreamInfer"
    answers = channel.stream_stream(path, bytes, bytes)(requests(), timeout=DEADLINE)
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(answers))
    never.set()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == expecting("inference")


def test_the_client_is_served_with_the_header_and_refused_without(host: RunningHost) -> None:
    headers = {"triton-grpc-protocol-key-inference": "of inference"}
    with host.client() as client:
        assert run_command(client, "echo x", headers=headers) == "x"
        assert infer_error(run_command, client, "echo x") == (
            "StatusCode.UNAVAILABLE",
            expecting("inference"),
        )


def test_other_categories_stay_open_and_one_key_may_be_for_several(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    flag = "--grpc-restricted-protocol=model-repository,logging:Admin-Key=a:b=c"
    host = serve(repository, flag).wait_started()
    expected = "This protocol is restricted, expecting header 'triton-grpc-protocol-Admin-Key'"
    with host.client() as client:
        assert run_command(client, "echo x") == "x"
        assert client.is_server_live()
        for send_request in (client.get_model_repository_index, client.get_log_settings):
            assert infer_error(send_request) == ("StatusCode.UNAVAILABLE", expected)
        headers = {"triton-grpc-protocol-admin-key": "a:b=c"}
        index = client.get_model_repository_index(headers=headers)
        assert [model.name for model in index.models] == ["misbehave"]


# HTTP

ENDPOINTS = {
    "health": ["GET /v2/health/live", "GET /v2/health/ready", "GET /v2/models/misbehave/ready"],
    "metadata": ["GET /v2", "GET /v2/models/misbehave", "GET /v2/models/misbehave/versions/1"],
    "inference": [
        "POST /v2/models/misbehave/infer",
        "POST /v2/models/misbehave/generate",
        "POST /v2/models/misbehave/versions/1/generate_stream",
    ],
    "shared-memory": [
        "GET /v2/systemsharedmemory/status",
        "POST /v2/systemsharedmemory/region/r/register",
        "POST /v2/systemsharedmemory/unregister",
        "GET /v2/cudasharedmemory/region/r/status",
        "POST /v2/cudasharedmemory/region/r/register",
        "POST /v2/cudasharedmemory/region/r/unregister",
    ],
    "model-config": ["GET /v2/models/misbehave/config"],
    "model-repository": [
        "POST /v2/repository/index",
        "POST /v2/repository/models/misbehave/load",
        "POST /v2/repository/models/misbehave/unload",
    ],
    "statistics": ["GET /v2/models/stats", "GET /v2/models/misbehave/stats"],
    "trace": ["GET /v2/trace/setting", "POST /v2/models/misbehave/trace/setting"],
    "logging": ["GET /v2/logging", "POST /v2/logging"],
    "recording": ["POST /v2/models/misbehave/record"],
}
PATHS = [(path, category) for category, paths in ENDPOINTS.items() for path in paths]


def http(host: RunningHost, request: str, *headers: tuple[str, str]) -> tuple[int, str]:
    """Status and body of the answer to a request, which is sent without its body."""
    method, path = request.split()
    connection = http_client.HTTPConnection(host.http_url, timeout=DEADLINE)
    with closing(connection):
        connection.putrequest(method, path)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def forbidden(category: str) -> tuple[int, str]:
    text = f"This API is restricted, expecting header 'Key-{category}'"
    return 403, json.dumps({"error": text}, separators=(",", ":"))


def test_the_endpoints_are_of_every_category() -> None:
    assert set(ENDPOINTS) == set(CATEGORIES)


@pytest.mark.parametrize(("request_line", "category"), PATHS)
def test_an_endpoint_needs_the_header_of_its_category(
    host: RunningHost, request_line: str, category: str
) -> None:
    assert http(host, request_line) == forbidden(category)
    assert http(host, request_line, (f"key-{category}", "of")) == forbidden(category)
    others = [(f"Key-{other}", f"of {other}") for other in CATEGORIES if other != category]
    assert http(host, request_line, *others) == forbidden(category)
    right = (f"kEY-{category}", f"of {category}")
    assert http(host, request_line, right, ("Content-Length", "0"))[0] != 403


@pytest.mark.parametrize("kind", ["infer", "generate_stream"])
def test_a_restricted_request_is_refused_before_its_body_is_read(
    host: RunningHost, kind: str
) -> None:
    line = f"POST /v2/models/misbehave/{kind}"
    assert http(host, line, ("Content-Length", "1000")) == forbidden("inference")


def test_the_restriction_is_checked_before_the_method(host: RunningHost) -> None:
    assert http(host, "DELETE /v2/models/misbehave/config") == forbidden("model-config")
    right = ("key-model-config", "of model-config")
    assert http(host, "DELETE /v2/models/misbehave/config", right)[0] == 405


def test_the_first_of_duplicate_headers_counts(host: RunningHost) -> None:
    right, wrong = ("key-metadata", "of metadata"), ("key-metadata", "no")
    assert http(host, "GET /v2", wrong, right) == forbidden("metadata")
    assert http(host, "GET /v2", right, wrong)[0] == 200


def test_unknown_paths_are_not_restricted(host: RunningHost) -> None:
    assert http(host, "GET /v2/nothing")[0] == 404


def test_metrics_are_not_restricted(host: RunningHost) -> None:
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as page:
        assert page.status == 200


def test_http_and_grpc_have_their_own_restrictions(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(repository, "--http-restricted-api=health:k=v").wait_started()
    with host.client() as client:
        assert client.is_server_live()
    status, body = http(host, "GET /v2/health/live")
    assert (status, "expecting header 'k'" in body) == (403, True)
    assert http(host, "GET /v2/health/live", ("K", "v")) == (200, "")
