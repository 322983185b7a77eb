"""Requests that need a secret header: what is restricted by which category, on every door."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb

from tests.asking import command, failure
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
    ).wait_started()


@pytest.fixture(scope="module")
def channel(host: RunningHost) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(host.url) as channel:
        yield channel


def call(channel: grpc.Channel, rpc: str, *metadata: tuple[str, str]) -> str:
    """Ask with an empty message; the details of the failure, "" if there is none."""
    method = SERVICE.methods_by_name[rpc]
    request = GetMessageClass(method.input_type)
    path = f"/{SERVICE.full_name}/{rpc}"
    try:
        if method.client_streaming:
            ask = channel.stream_stream(path, request.SerializeToString)
            list(ask(iter([]), metadata=metadata, timeout=DEADLINE))
        else:
            channel.unary_unary(path, request.SerializeToString)(
                request(), metadata=metadata, timeout=DEADLINE
            )
    except grpc.RpcError as error:
        restricted = "restricted" in error.details()
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
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    with pytest.raises(grpc.RpcError) as caught:
        check(b"", timeout=DEADLINE)
    assert caught.value.details() == expecting("health")
    metadata = [("triton-grpc-protocol-key-health", "of health")]
    assert check(b"", metadata=metadata, timeout=DEADLINE) == b"\x08\x01"


def test_of_a_key_that_is_sent_twice_the_first_counts(channel: grpc.Channel) -> None:
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
    answers = channel.stream_stream(path)(requests(), timeout=DEADLINE)
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    never.set()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == expecting("inference")


def test_the_client_asks_with_headers_and_is_refused_without(host: RunningHost) -> None:
    headers = {"triton-grpc-protocol-key-inference": "of inference"}
    with host.client() as client:
        assert command(client, "echo x", headers=headers) == "x"
        assert failure(command, client, "echo x") == (
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
        assert command(client, "echo x") == "x"
        assert client.is_server_live()
        for ask in (client.get_model_repository_index, client.get_log_settings):
            assert failure(ask) == ("StatusCode.UNAVAILABLE", expected)
        headers = {"triton-grpc-protocol-admin-key": "a:b=c"}
        index = client.get_model_repository_index(headers=headers)
        assert [model.name for model in index.models] == ["misbehave"]
