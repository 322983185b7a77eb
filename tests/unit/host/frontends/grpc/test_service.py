"""RPCs as functions of bytes, and the tables that engines rely on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from host.errors import ErrorCode, HostError, internal
from host.frontends.error_status import GRPC_STATUS
from host.frontends.grpc.grpc_admin import admin_services
from host.frontends.grpc.methods import (
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    Metadata,
    StreamMethod,
    UnaryMethod,
)
from host.frontends.grpc.service import SHUTTING_DOWN, GrpcService
from host.frontends.grpc.standard_services import REFLECTION_SERVICES
from host.inference.call import Call
from tests.unit.host.frontends.grpc.echo_core import EchoCore, echo

UNUSED: Any = None


@pytest.fixture
def core() -> EchoCore:
    return EchoCore()


def send_request(
    core: EchoCore, method: str, request: Any, service: str = INFERENCE_SERVICE
) -> bytes:
    """The bytes that an RPC answers."""
    (found,) = [
        m for m in GrpcService(core, admin_services(core)).services()[service] if m.name == method
    ]
    assert isinstance(found, UnaryMethod)
    data = request if isinstance(request, bytes) else request.SerializeToString()

    async def run() -> bytes:
        return await found.handler(data, Metadata())

    return asyncio.run(run())


def refusal(core: EchoCore, method: str, request: Any) -> HostError:
    with pytest.raises(HostError) as caught:
        send_request(core, method, request)
    return caught.value


def infer(model: str, **fields: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="INPUT0", datatype="INT32", shape=[1])
    request.raw_input_contents.append(b"1234")
    return request


def test_every_error_code_has_a_status() -> None:
    assert set(GRPC_STATUS) == set(ErrorCode)
    assert len(set(GRPC_STATUS.values())) == len(GRPC_STATUS)


def test_every_rpc_of_the_protocol_is_there(core: EchoCore) -> None:
    published = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert published.full_name == INFERENCE_SERVICE
    methods = GrpcService(core, admin_services(core)).services()[INFERENCE_SERVICE]
    assert {(m.name, isinstance(m, StreamMethod)) for m in methods} == {
        (m.name, m.client_streaming) for m in published.methods
    }


def test_a_request_is_answered_with_its_id_and_outputs(core: EchoCore) -> None:
    answer = pb.ModelInferResponse.FromString(
        send_request(core, "ModelInfer", infer("echo", id="7"))
    )
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "echo", "1")
    assert answer.outputs[0].name == "OUTPUT0" and list(answer.raw_output_contents) == [b"1234"]
    assert "triton_final_response" not in answer.parameters


@pytest.mark.parametrize(
    "model, code, text",
    [
        ("missing", ErrorCode.NOT_FOUND, "Request for unknown model: 'missing' is not found"),
        (
            "repeat",
            ErrorCode.UNSUPPORTED,
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        ),
        ("fail", ErrorCode.INTERNAL, "the model said no"),
        ("silent", ErrorCode.INTERNAL, "expected a single response, got 0"),
    ],
)
def test_infer_fails(core: EchoCore, model: str, code: ErrorCode, text: str) -> None:
    error = refusal(core, "ModelInfer", infer(model))
    assert (error.code, error.message) == (code, text)


def test_the_version_is_checked_before_the_model_and_that_before_parameters(core: EchoCore) -> None:
    request = infer("missing", model_version="x")
    request.parameters["priority"].int64_param = -1
    assert "failed to get model version" in refusal(core, "ModelInfer", request).message
    request.model_version = "1"
    assert "unknown model" in refusal(core, "ModelInfer", request).message
    request.model_name = "echo"
    assert "priority" in refusal(core, "ModelInfer", request).message


def test_more_than_one_response_is_an_error_and_cancels_the_rest(core: EchoCore) -> None:
    async def run() -> None:
        answers: list[bytes | HostError] = []
        call = GrpcService(core, admin_services(core)).start_infer(
            infer("hold").SerializeToString(), answers.append, Metadata()
        )
        assert isinstance(call, Call)
        call.respond(echo(call.request), final=False)
        (answer,) = answers
        assert isinstance(answer, HostError)
        assert answer.message == "expected a single response, got 2"
        assert call.cancelled

    asyncio.run(run())


def test_a_cancelled_handler_cancels_its_call(core: EchoCore) -> None:
    async def run() -> None:
        (method,) = [
            m
            for m in GrpcService(core, admin_services(core)).services()[INFERENCE_SERVICE]
            if m.name == "ModelInfer"
        ]
        assert isinstance(method, UnaryMethod)
        data = infer("hold", id="7").SerializeToString()
        task = asyncio.ensure_future(method.handler(data, Metadata()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and core.cancelled.get_nowait() == "7"

    asyncio.run(run())


def test_health_follows_the_state_of_the_server(core: EchoCore) -> None:
    assert pb.ServerLiveResponse.FromString(send_request(core, "ServerLive", b"")).live
    assert pb.ServerReadyResponse.FromString(send_request(core, "ServerReady", b"")).ready
    assert send_request(core, "Check", b"\x0a\x03any", HEALTH_SERVICE) == b"\x08\x01"
    core.health.is_ready = False
    assert not pb.ServerReadyResponse.FromString(send_request(core, "ServerReady", b"")).ready
    assert send_request(core, "Check", b"", HEALTH_SERVICE) == b"\x08\x02"
    core.health.exiting = True
    for method in ("ServerLive", "ServerReady"):
        error = refusal(core, method, b"")
        assert (error.code, error.message) == (ErrorCode.UNAVAILABLE, "Server exiting")


def test_metadata_and_configuration_are_returned(core: EchoCore) -> None:
    server = pb.ServerMetadataResponse.FromString(send_request(core, "ServerMetadata", b""))
    assert (server.name, server.version) == ("triton", "1.2.3")
    assert list(server.extensions) == ["statistics", "parameters"]
    model = pb.ModelMetadataResponse.FromString(
        send_request(core, "ModelMetadata", pb.ModelMetadataRequest(name="echo"))
    )
    assert (model.name, list(model.versions), model.platform) == ("echo", ["1"], "python")
    assert list(model.inputs[0].shape) == [-1, 16] and model.outputs[0].datatype == "FP32"
    config = pb.ModelConfigResponse.FromString(
        send_request(core, "ModelConfig", pb.ModelConfigRequest(name="echo"))
    )
    assert config.config.backend == "python"


def test_a_missing_model_is_not_ready(core: EchoCore) -> None:
    def ready(name: str, version: str = "") -> bool:
        data = send_request(core, "ModelReady", pb.ModelReadyRequest(name=name, version=version))
        return bool(pb.ModelReadyResponse.FromString(data).ready)

    assert ready("echo") and not ready("echo", "9")
    assert not ready("missing"), "clients ask in a loop until a model is there"


def test_the_statistics_of_a_model_are_returned(core: EchoCore) -> None:
    data = send_request(core, "ModelStatistics", pb.ModelStatisticsRequest(name="echo"))
    (model,) = pb.ModelStatisticsResponse.FromString(data).model_stats
    assert (model.name, model.version, model.last_inference) == ("echo", "1", 5)
    assert (model.inference_count, model.execution_count) == (8, 1)
    assert (model.inference_stats.success.count, model.inference_stats.success.ns) == (1, 1000)
    assert model.inference_stats.fail.count == 0
    assert model.batch_stats[0].batch_size == 8 and model.batch_stats[0].compute_infer.ns == 1000


def test_the_repository_index_may_list_ready_models_alone(core: EchoCore) -> None:
    def index(**fields: Any) -> list[tuple[str, str, str, str]]:
        data = send_request(core, "RepositoryIndex", pb.RepositoryIndexRequest(**fields))
        models = pb.RepositoryIndexResponse.FromString(data).models
        return [(m.name, m.version, m.state, m.reason) for m in models]

    assert index() == [("echo", "1", "READY", ""), ("new", "", "", "")]
    assert index(ready=True) == [("echo", "1", "READY", "")]


def test_load_and_unload(core: EchoCore) -> None:
    load = pb.RepositoryModelLoadRequest(model_name="echo")
    load.parameters["config"].string_param = "{}"
    load.parameters["file:1/model.py"].bytes_param = b"code"
    send_request(core, "RepositoryModelLoad", load)
    assert core.control.loaded == [("echo", {"config": "{}", "file:1/model.py": b"code"})]
    unload = pb.RepositoryModelUnloadRequest(model_name="echo")
    send_request(core, "RepositoryModelUnload", unload)
    unload.parameters["unload_dependents"].bool_param = True
    unload.parameters["other"].string_param = "ignored"
    send_request(core, "RepositoryModelUnload", unload)
    assert core.control.unloaded == [("echo", False), ("echo", True)]


@pytest.mark.parametrize(
    "key, field, text",
    [
        (
            "config",
            "bytes_param",
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            "file:a",
            "string_param",
            "invalid value type for load parameter 'file:a', expected bytes_param.",
        ),
        ("mine", "string_param", "unrecognized load parameter 'mine'."),
    ],
)
def test_load_parameters(core: EchoCore, key: str, field: str, text: str) -> None:
    load = pb.RepositoryModelLoadRequest(model_name="echo")
    setattr(load.parameters[key], field, b"x" if field == "bytes_param" else "x")
    error = refusal(core, "RepositoryModelLoad", load)
    assert (error.code, error.message) == (ErrorCode.INVALID_ARG, text)


def test_refusals_of_load_and_unload(core: EchoCore) -> None:
    error = refusal(core, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=" "))
    assert error.message == "Model name cannot be empty. Please enter a valid name to deploy."
    unload = pb.RepositoryModelUnloadRequest(model_name="echo")
    unload.parameters["unload_dependents"].string_param = "true"
    assert refusal(core, "RepositoryModelUnload", unload).message == (
        "invalid value type for 'unload_dependents' parameter, expected bool_param."
    )
    for method in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"):
        request = getattr(pb, f"{method}Request")(repository_name="r")
        error = refusal(core, method, request)
        assert error.code is ErrorCode.UNSUPPORTED
        assert error.message == "'repository_name' specification is not supported"
    assert not core.control.loaded and not core.control.unloaded


@pytest.mark.parametrize("kind", ["System", "Cuda"])
def test_client_shared_memory_is_off(core: EchoCore, kind: str) -> None:
    assert send_request(core, f"{kind}SharedMemoryStatus", b"") == b""
    status = getattr(pb, f"{kind}SharedMemoryStatusRequest")(name="r")
    error = refusal(core, f"{kind}SharedMemoryStatus", status)
    assert error.code is ErrorCode.NOT_FOUND
    assert error.message == f"Unable to find {kind.lower()} shared memory region: 'r'"
    for method in ("Register", "Unregister"):
        error = refusal(core, f"{kind}SharedMemory{method}", b"")
        assert error.code is ErrorCode.UNSUPPORTED
        assert error.message == (
            "Client shared memory is disabled. "
            "Start the server with '--allow-client-shm=true' to enable."
        )


def test_malformed_messages_are_an_invalid_argument(core: EchoCore) -> None:
    error = refusal(core, "ModelReady", b"\xff\xff\xff")
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message.startswith("failed to parse the ModelReadyRequest message")


def test_draining_refuses_new_requests_and_waits_for_open_ones(core: EchoCore) -> None:
    async def run() -> None:
        service = GrpcService(core, admin_services(core))
        answers: list[bytes | HostError] = []
        data = infer("hold").SerializeToString()
        call = service.start_infer(data, answers.append, Metadata())
        assert isinstance(call, Call)
        assert not await service.drain(0)
        with pytest.raises(HostError) as caught:
            service.start_infer(data, answers.append, Metadata())
        assert (caught.value.code, caught.value.message) == (ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
        draining = asyncio.ensure_future(service.drain(5))
        await asyncio.sleep(0)
        assert not draining.done()
        services = service.services()
        for name in (INFERENCE_SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES):
            for method in services[name]:
                if isinstance(method, StreamMethod):  # else it would stay open after the drain
                    with pytest.raises(HostError, match=SHUTTING_DOWN):
                        method.open_stream(UNUSED, Metadata())
        call.fail(internal("over"))
        assert await draining
        assert len(answers) == 1
        assert await service.drain(0)

    asyncio.run(run())
