"""Server reflection and health watches, as grpcurl and load balancers use them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from tritonclient.grpc import service_pb2

from host.frontends.grpc.standard_services import REFLECTION_SERVICES, _message_class
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


@pytest.fixture(scope="module", params=["h2", "grpcio", "frontends"])
def host(
    request: pytest.FixtureRequest, module_serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> RunningHost:
    repository = RepositoryBuilder(tmp_path_factory.mktemp("repository"))
    repository.copy("identity")
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("all all-models-key\nasker infer-only-key allow=inference\n")
    engine = "grpcio" if request.param == "grpcio" else "h2"
    frontends = int(request.param == "frontends")
    return module_serve(
        repository,
        f"--grpc-engine={engine}",
        f"--frontend-processes={frontends}",
        f"--api-key-file={keys}",
    ).wait_started()


def connect(host: RunningHost) -> Any:
    """A channel, without the types of grpc-stubs, which want serializers."""
    return grpc.insecure_channel(host.url)


def ask(
    channel: Any, *requests: Any, service: str = REFLECTION_SERVICES[0], key: str = ""
) -> list[Any]:
    """The answers of the reflection service."""
    method = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=_message_class("ServerReflectionResponse").FromString,
    )
    metadata = [("authorization", f"Bearer {key}")] if key else None
    return list(method(iter(requests), timeout=DEADLINE, metadata=metadata))


def request(**fields: str) -> Any:
    return _message_class("ServerReflectionRequest")(**fields)


@pytest.mark.parametrize("service", REFLECTION_SERVICES)
def test_a_tool_finds_services_and_builds_their_messages(host: RunningHost, service: str) -> None:
    asked = [
        request(list_services=""),
        request(file_containing_symbol="inference.GRPCInferenceService"),
        request(file_containing_symbol="grpc.health.v1.Health"),
        request(file_by_filename="model_config.proto"),
        request(file_containing_symbol=service),
        request(file_by_filename="nope.proto"),
        request(all_extension_numbers_of_type="inference.ModelInferRequest"),
        request(),
        request(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
        request(file_containing_symbol="inference.GRPCInferenceService.Nope"),
    ]
    with connect(host) as channel:
        answers = ask(channel, *asked, service=service, key="all-models-key")
    assert [answer.original_request for answer in answers] == asked
    listed = [one.name for one in answers[0].list_services_response.service]
    assert listed == sorted(
        ["inference.GRPCInferenceService", "grpc.health.v1.Health", *REFLECTION_SERVICES]
    )
    pool = descriptor_pool.DescriptorPool()
    known = {}
    for answer in answers[1:5]:
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            known[file.name] = file
    for name in sorted(known, key=lambda name: len(known[name].dependency)):
        pool.Add(known[name])
    found = pool.FindServiceByName("inference.GRPCInferenceService")
    published = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert [method.name for method in found.methods] == [one.name for one in published.methods]
    assert pool.FindServiceByName(service).methods[0].client_streaming
    assert (answers[5].error_response.error_code, answers[7].error_response.error_code) == (5, 5)
    assert answers[8].file_descriptor_response == answers[1].file_descriptor_response
    assert answers[9].error_response.error_code == 5
    assert answers[6].all_extension_numbers_response.base_type_name == "inference.ModelInferRequest"


def test_reflection_needs_a_key_that_allows_metadata(host: RunningHost) -> None:
    with connect(host) as channel:
        for key, code in (
            ("", grpc.StatusCode.UNAUTHENTICATED),
            ("wrong-key-of-all", grpc.StatusCode.UNAUTHENTICATED),
            ("infer-only-key", grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask(channel, request(list_services=""), key=key)
            assert caught.value.code() is code


def test_a_message_that_is_none_ends_the_stream(host: RunningHost) -> None:
    with connect(host) as channel:
        method = channel.stream_stream(f"/{REFLECTION_SERVICES[0]}/ServerReflectionInfo")
        metadata = [("authorization", "Bearer all-models-key")]
        with pytest.raises(grpc.RpcError) as caught:
            list(method(iter([b"\xff"]), timeout=DEADLINE, metadata=metadata))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(
        "failed to parse the ServerReflectionRequest message"
    )


def watch(channel: Any) -> Iterator[bytes]:
    method = channel.unary_stream("/grpc.health.v1.Health/Watch")
    return iter(method(b"", timeout=DEADLINE))


@pytest.mark.parametrize("engine", ["h2", "grpcio"])
def test_a_watch_sends_each_change_and_ends_with_the_server(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    repository.copy("identity")
    host = serve(
        repository,
        f"--grpc-engine={engine}",
        "--exit-delay-secs=1.5",
        "--grpc-reflection=false",
        "--exit-timeout-secs=60",
    ).wait_started()
    with connect(host) as channel:
        with pytest.raises(grpc.RpcError) as unknown:
            ask(channel, request(list_services=""))
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        statuses = watch(channel)
        assert next(statuses) == SERVING
        stopping = threading.Thread(target=host.stop)
        stopping.start()
        assert next(statuses) == NOT_SERVING
        with pytest.raises(grpc.RpcError) as ended:
            next(statuses)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        stopping.join(DEADLINE)
    assert "Exit timeout expired" not in host.output


def test_reflection_is_restricted_like_metadata(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    flag = "--grpc-restricted-protocol=metadata:key=secret"
    host = serve(repository, flag).wait_started()
    with connect(host) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            ask(channel, request(list_services=""))
        assert "This protocol is restricted" in str(caught.value.details())
