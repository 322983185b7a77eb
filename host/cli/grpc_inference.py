"""Sends inference requests of `pbhost infer` over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from host.cli.inference import (
    Inference,
    Parameter,
    content_of,
    datatype_of,
    received_tensor,
    response_of,
)
from host.cli.server_client import read_headers
from host.errors import HostError, internal, invalid_argument, unavailable
from pb_utils import InferenceResponse

_SCHEME = "grpc://"
_TLS_SCHEME = "grpcs://"
_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
# A server may answer with UNAVAILABLE too, so only the text tells that there is no connection.
_NO_CONNECTION = ("failed to connect", "DNS resolution failed")


class GrpcInferenceClient:
    """Asks the gRPC port of a server (docs/reference/protocol.md, "gRPC").

    `timeout`: seconds until the last response of a call.
    """

    def __init__(self, url: str, headers: Sequence[str], timeout: float) -> None:
        """Raises HostError if a header cannot be sent."""
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._metadata = [(name.lower(), value) for name, value in read_headers(headers).items()]
        scheme, target = self._url.split("://", 1)
        if f"{scheme}://" == _TLS_SCHEME:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.secure_channel(target, credentials, _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(target, _OPTIONS)
        self._service = GRPCInferenceServiceStub(self._channel)

    def read_config(self, model: str, version: str) -> dict[str, Any]:
        """Returns the configuration of a model. Raises HostError."""
        request = pb.ModelConfigRequest(name=model, version=version)
        return _to_dict(self._call(self._service.ModelConfig, request).config)

    def read_metadata(self, model: str, version: str) -> dict[str, Any]:
        """Returns the metadata of a model. Raises HostError."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return _to_dict(self._call(self._service.ModelMetadata, request))

    def infer(self, request: Inference, decoupled: bool) -> Iterator[InferenceResponse]:
        """Sends a request and yields its responses as they arrive. Raises HostError."""
        message = _to_message(request)
        if not decoupled:
            yield _to_response(self._call(self._service.ModelInfer, message))
            return
        message.parameters[_EMPTY_FINAL].bool_param = True
        for answer in self._stream(message):
            if answer.error_message:
                yield response_of([], {}, answer.error_message)
                continue
            response = answer.infer_response
            final = response.parameters[_FINAL].bool_param
            del response.parameters[_FINAL]
            if not final or response.outputs:
                yield _to_response(response)
            if final:
                return

    def _stream(self, message: pb.ModelInferRequest) -> Iterator[pb.ModelStreamInferResponse]:
        answers = self._call(self._service.ModelStreamInfer, iter([message]))
        try:
            yield from answers
        except grpc.RpcError as error:
            raise self._error(error) from error

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from error
        except ValueError as error:  # of grpc, for an invalid name or value of a header
            raise invalid_argument(f"a header cannot be sent: {error}") from error

    def _error(self, error: Any) -> HostError:
        details = error.details() or f"status {error.code().name}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return unavailable(f"no answer from {self._url}: {details}")
        if details.startswith(_NO_CONNECTION):
            return unavailable(
                f"no answer from {self._url}: {details}; is it the address of the gRPC port?"
            )
        return internal(details)


def _to_dict(message: Any) -> dict[str, Any]:
    """Returns a message with all fields, under their names in the configuration file."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _to_message(request: Inference) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(
        model_name=request.model, model_version=request.version, id=request.id
    )
    for name, value in request.parameters.items():
        setattr(message.parameters[name], _field_of(value), value)
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name(), datatype=datatype_of(tensor), shape=tensor.shape())
        message.raw_input_contents.append(content_of(tensor))
    for name in request.outputs:
        message.outputs.add(name=name)
    return message


def _field_of(value: Parameter) -> str:
    if isinstance(value, int) and value >= 1 << 63:  # the id of a sequence
        return "uint64_param"
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "bool_param"),  # before int, because bool is a subclass of it
        (int, "int64_param"),
        (float, "double_param"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "string_param")


def _to_response(message: pb.ModelInferResponse) -> InferenceResponse:
    if len(message.outputs) != len(message.raw_output_contents):
        raise internal("the server sent outputs that are not in raw form")
    outputs = [
        received_tensor(output.name, output.datatype, output.shape, content)
        for output, content in zip(message.outputs, message.raw_output_contents, strict=True)
    ]
    return response_of(outputs, _to_parameters(message.parameters))


def _to_parameters(parameters: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: getattr(value, kind)
        for name, value in parameters.items()
        if (kind := value.WhichOneof("parameter_choice")) is not None
    }
