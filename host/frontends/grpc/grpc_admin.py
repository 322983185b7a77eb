"""All RPCs but inference, as handlers of message bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from host.access.api_keys import CATEGORY_WITHOUT_KEY, ApiKeys
from host.access.clients import Client
from host.errors import ErrorCode, HostError, invalid_argument, unsupported
from host.frontends.grpc.methods import (
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    RpcContext,
    Services,
    UnaryHandler,
    UnaryMethod,
)
from host.inference.request import Parameter
from host.logs.log_settings import GRPC
from host.tracing.trace_settings import NUMBERS, SettingChanges, to_change

if TYPE_CHECKING:
    from host.core import Core


# HealthCheckResponse has one field, the enum `status` = 1.
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"


def _bytes_handler(
    request_type: Any,
    answer: Callable[[Any], Awaitable[Any]],
    category: str,
    api_keys: ApiKeys | None,
) -> UnaryHandler:
    """Makes a handler of bytes from a handler of messages; it checks the key of the client."""
    model_field = _MODEL_FIELDS.get(request_type)

    async def handle(data: bytes, context: RpcContext) -> bytes:
        client: Client | None = None
        if api_keys is not None and category != CATEGORY_WITHOUT_KEY:
            client = api_keys.authorize(category, context.metadata("authorization"))
        try:
            request = request_type.FromString(data)
        except DecodeError as error:
            name = request_type.DESCRIPTOR.name
            raise invalid_argument(f"failed to parse the {name} message: {error}") from None
        if client is not None and model_field is not None:
            client.check_model(getattr(request, model_field) if model_field else "")
        response: bytes = (await answer(request)).SerializeToString()
        return response

    return handle


_MODEL_FIELDS = {
    pb.ModelMetadataRequest: "name",
    pb.ModelConfigRequest: "name",
    pb.ModelStatisticsRequest: "name",
    pb.RepositoryIndexRequest: "",
    pb.RepositoryModelLoadRequest: "model_name",
    pb.RepositoryModelUnloadRequest: "model_name",
    pb.TraceSettingRequest: "model_name",
}
"""The field with the name of a model; "" for a request about all models."""


class _Admin:
    """One method for each RPC, from request message to response message.

    The dataclasses of `host.inference.metadata` have the field names of the messages.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    async def health_check(self, data: bytes, context: RpcContext) -> bytes:
        return _SERVING if await self._core.health.ready() else _NOT_SERVING

    async def server_live(self, request: Any) -> Any:
        return pb.ServerLiveResponse(live=self._core.health.live())

    async def server_ready(self, request: Any) -> Any:
        return pb.ServerReadyResponse(ready=await self._core.health.ready())

    async def server_metadata(self, request: Any) -> Any:
        return pb.ServerMetadataResponse(**asdict(self._core.server_metadata()))

    async def model_ready(self, request: Any) -> Any:
        try:
            ready = await self._core.health.model_ready(request.name, request.version)
        except HostError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            ready = False  # not an error, as clients poll until the model is loaded
        return pb.ModelReadyResponse(ready=ready)

    async def model_metadata(self, request: Any) -> Any:
        await self._core.refresh_remote(request.name)
        metadata = self._core.model_metadata(request.name, request.version)
        return pb.ModelMetadataResponse(**asdict(metadata))

    async def model_config(self, request: Any) -> Any:
        await self._core.refresh_remote(request.name)
        config = self._core.model_config(request.name, request.version)
        return pb.ModelConfigResponse(config=config)

    async def model_statistics(self, request: Any) -> Any:
        statistics = await self._core.collect_statistics(request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=[asdict(entry) for entry in statistics])

    async def repository_index(self, request: Any) -> Any:
        _refuse_repository_name(request)
        entries = await self._core.repository_index(request.ready)
        return pb.RepositoryIndexResponse(models=[asdict(entry) for entry in entries])

    async def repository_model_load(self, request: Any) -> Any:
        _refuse_repository_name(request)
        if not request.model_name.strip():
            raise invalid_argument(
                "Model name cannot be empty. Please enter a valid name to deploy."
            )
        await self._core.control.load_model(
            request.model_name, _load_parameters(request.parameters)
        )
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Any) -> Any:
        _refuse_repository_name(request)
        dependents = False
        if "unload_dependents" in request.parameters:
            value = request.parameters["unload_dependents"]
            if value.WhichOneof("parameter_choice") != "bool_param":
                raise invalid_argument(
                    "invalid value type for 'unload_dependents' parameter, expected bool_param."
                )
            dependents = value.bool_param
        await self._core.control.unload_model(request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    async def system_shared_memory_status(self, request: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for status in self._core.regions.status(request.name):
            region = response.regions[status.name]
            region.name, region.key = status.name, status.key
            region.offset, region.byte_size = status.offset, status.byte_size
        return response

    async def system_shared_memory_register(self, request: Any) -> Any:
        self._core.regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(self, request: Any) -> Any:
        self._core.regions.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(self, request: Any) -> Any:
        self._core.regions.cuda_status(request.name)
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_shared_memory_register(self, request: Any) -> Any:
        self._core.regions.register_cuda(request.name)

    async def cuda_shared_memory_unregister(self, request: Any) -> Any:
        self._core.regions.require_enabled()  # none exist, and unregistering them all succeeds
        return pb.CudaSharedMemoryUnregisterResponse()

    async def trace_setting(self, request: Any) -> Any:
        shown = self._core.trace_settings(request.model_name)  # reports an unknown model first
        if request.settings:
            shown = self._core.trace_settings(request.model_name, trace_change(request.settings))
        response = pb.TraceSettingResponse()
        for name, value in shown.items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response

    async def log_settings(self, request: Any) -> Any:
        given = {name: _setting_value(value) for name, value in request.settings.items()}
        response = pb.LogSettingsResponse()
        for name, value in self._core.log.update(given, GRPC).items():
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(response.settings[name], kind, value)
        return response


_SHM = "shared-memory"
_ANSWERS: dict[Any, tuple[str, Callable[[_Admin, Any], Awaitable[Any]]]] = {
    pb.ServerLiveRequest: ("health", _Admin.server_live),
    pb.ServerReadyRequest: ("health", _Admin.server_ready),
    pb.ServerMetadataRequest: ("metadata", _Admin.server_metadata),
    pb.ModelReadyRequest: ("health", _Admin.model_ready),
    pb.ModelMetadataRequest: ("metadata", _Admin.model_metadata),
    pb.ModelConfigRequest: ("model-config", _Admin.model_config),
    pb.ModelStatisticsRequest: ("statistics", _Admin.model_statistics),
    pb.RepositoryIndexRequest: ("model-repository", _Admin.repository_index),
    pb.RepositoryModelLoadRequest: ("model-repository", _Admin.repository_model_load),
    pb.RepositoryModelUnloadRequest: ("model-repository", _Admin.repository_model_unload),
    pb.SystemSharedMemoryStatusRequest: (_SHM, _Admin.system_shared_memory_status),
    pb.CudaSharedMemoryStatusRequest: (_SHM, _Admin.cuda_shared_memory_status),
    pb.SystemSharedMemoryRegisterRequest: (_SHM, _Admin.system_shared_memory_register),
    pb.SystemSharedMemoryUnregisterRequest: (_SHM, _Admin.system_shared_memory_unregister),
    pb.CudaSharedMemoryRegisterRequest: (_SHM, _Admin.cuda_shared_memory_register),
    pb.CudaSharedMemoryUnregisterRequest: (_SHM, _Admin.cuda_shared_memory_unregister),
    pb.TraceSettingRequest: ("trace", _Admin.trace_setting),
    pb.LogSettingsRequest: ("logging", _Admin.log_settings),
}


def _method_name(request_type: Any) -> str:
    name: str = request_type.DESCRIPTOR.name
    return name.removesuffix("Request")


ADMIN_METHODS: dict[str, dict[str, str]] = {
    INFERENCE_SERVICE: {
        _method_name(request_type): category for request_type, (category, _) in _ANSWERS.items()
    },
    HEALTH_SERVICE: {"Check": "health"},
}
"""The category of each method of `admin_services`, by service and by name."""


def admin_services(core: Core, api_keys: ApiKeys | None = None) -> Services:
    """The methods of all services but those for inference. `api_keys`: what clients need."""
    admin = _Admin(core)
    return {
        INFERENCE_SERVICE: [
            UnaryMethod(
                _method_name(request_type),
                _bytes_handler(request_type, partial(answer, admin), category, api_keys),
                category,
            )
            for request_type, (category, answer) in _ANSWERS.items()
        ],
        HEALTH_SERVICE: [UnaryMethod("Check", admin.health_check, "health")],
    }


def _setting_value(value: Any) -> object:
    """The value that a client has set; None, which is always invalid, if it is empty."""
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def trace_change(settings: Mapping[str, Any]) -> SettingChanges:
    """The change of trace settings that a client requests. Raises HostError."""
    numbers: dict[str, str | None] = {}
    for name in NUMBERS:
        if name in settings:
            values = settings[name].value
            if len(values) > 1:
                raise invalid_argument(f"expect only 1 value for '{name}'")
            numbers[name] = values[0] if values else None
    levels = list(settings["trace_level"].value) if "trace_level" in settings else None
    return to_change(levels, numbers, file="trace_file" in settings, space=" ")


def _refuse_repository_name(request: Any) -> None:
    if request.repository_name:
        raise unsupported("'repository_name' specification is not supported")


def _load_parameters(parameters: Mapping[str, Any]) -> dict[str, Parameter | bytes]:
    """The overrides of a load request.

    Source: docs/reference/http.md, "Model repository".
    """
    loaded: dict[str, Parameter | bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            expected = "string_param"
        elif key.startswith("file:"):
            expected = "bytes_param"
        else:
            raise invalid_argument(f"unrecognized load parameter '{key}'.")
        if value.WhichOneof("parameter_choice") != expected:
            raise invalid_argument(
                f"invalid value type for load parameter '{key}', expected {expected}."
            )
        loaded[key] = getattr(value, expected)
    return loaded
