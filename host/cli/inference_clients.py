"""The clients of `pbhost infer`, `replay` and `bench`: requests over gRPC and HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import grpc
import msgspec
import numpy as np
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from host.cli.server_client import HttpAnswer, ServerClient, read_headers
from host.errors import HostError, internal, invalid_argument, unavailable, unsupported
from pb_utils import InferenceResponse, Tensor, TritonError
from pb_utils._datatypes import CODES, NAMES, SIZES, STORAGE

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Inference:
    """A request. `version`: "" for the version that the server chooses. `outputs`: [] for all."""

    model: str
    version: str
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


class InferenceClient(Protocol):
    """Asks a running server. Its methods raise HostError."""

    def read_config(self, model: str, version: str) -> dict[str, Any]:
        """Returns the configuration of a model, as JSON has it."""

    def read_metadata(self, model: str, version: str) -> dict[str, Any]:
        """Returns the metadata of a model, as JSON has it."""

    def read_statistics(self, model: str, version: str) -> dict[str, Any]:
        """Returns the statistics of a model, as JSON has them."""

    def infer(self, request: Inference, decoupled: bool) -> Iterator[InferenceResponse]:
        """Sends a request and yields its responses, each with outputs or an error."""


def datatype_of(tensor: Tensor) -> str:
    """Returns the data type of a tensor by its name in the protocol."""
    return NAMES[tensor.triton_dtype()]


def content_of(tensor: Tensor) -> bytes:
    """Returns the content of a tensor in the binary form of the protocol."""
    return bytes(tensor._wire_data())


def received_tensor(name: str, datatype: str, shape: Sequence[int], content: bytes) -> Tensor:
    """Returns a received tensor. Raises HostError if its content does not fit its shape."""
    elements = int(np.prod(shape, dtype=np.int64))
    size = elements * SIZES.get(datatype, 0)
    if datatype not in CODES or (datatype in SIZES and size != len(content)):
        shown = f"{len(content)} bytes for {datatype} {list(shape)}"
        raise internal(f"the server sent an invalid output '{name}': {shown}")
    return Tensor._from_wire(name, CODES[datatype], list(shape), memoryview(content), None)


def tensor_of_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor:
    """Returns a tensor that was received as JSON values. Raises HostError."""
    try:
        if datatype == "BYTES":
            flat = np.array(values, dtype=np.object_).ravel()
            return Tensor(name, flat.reshape(shape))
        array = np.array(values, dtype=STORAGE[CODES[datatype]])
        return Tensor(name, array.reshape(shape))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise internal(f"the server sent an invalid output '{name}': {error}") from error


def response_of(
    outputs: Sequence[Tensor], parameters: Mapping[str, object], error: str = ""
) -> InferenceResponse:
    """Returns a response as a model would receive it."""
    failed = TritonError(error) if error else None
    return InferenceResponse._from_wire(list(outputs), failed, parameters)


_SCHEME = "grpc://"
_TLS_SCHEME = "grpcs://"
EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
# A server may answer with UNAVAILABLE too, so only the text tells that there is no connection.
_NO_CONNECTION = ("failed to connect", "DNS resolution failed")


class GrpcInferenceClient:
    """Asks the gRPC port of a server (docs/reference/grpc.md, "gRPC").

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

    def read_statistics(self, model: str, version: str) -> dict[str, Any]:
        """Returns the statistics of a model. Raises HostError."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return _to_dict(self._call(self._service.ModelStatistics, request))

    def infer(self, request: Inference, decoupled: bool) -> Iterator[InferenceResponse]:
        """Sends a request and yields its responses as they arrive. Raises HostError."""
        message = to_message(request)
        if not decoupled:
            yield _to_response(self._call(self._service.ModelInfer, message))
            return
        message.parameters[EMPTY_FINAL].bool_param = True
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


def to_message(request: Inference) -> pb.ModelInferRequest:
    """Returns a request as gRPC has it. Raises a TypeError or ValueError for what it cannot be."""
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


class _ConfigInput(msgspec.Struct):
    name: str
    data_type: str
    dims: list[int | str]  # 64-bit numbers may be texts


class _Config(msgspec.Struct):
    """What a configuration must have to be one."""

    name: str
    input: list[_ConfigInput] = []
    max_batch_size: int = 0
    model_transaction_policy: dict[str, Any] = {}


class _MetadataInput(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]


class _Metadata(msgspec.Struct):
    """What the metadata of a model must have to be such."""

    name: str
    inputs: list[_MetadataInput] = []


class _Statistics(msgspec.Struct):
    """What the statistics of a model must have to be such."""

    model_stats: list[dict[str, Any]]


HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpInferenceClient:
    """Asks the HTTP port of a server (docs/reference/http.md, "HTTP/REST")."""

    def __init__(self, url: str, headers: Sequence[str], timeout: float) -> None:
        self._client = ServerClient(url, headers, timeout)

    def read_config(self, model: str, version: str) -> dict[str, Any]:
        """Returns the configuration of a model. Raises HostError."""
        return self._read(f"{model_path(model, version)}/config", _Config)

    def read_metadata(self, model: str, version: str) -> dict[str, Any]:
        """Returns the metadata of a model. Raises HostError."""
        return self._read(model_path(model, version), _Metadata)

    def read_statistics(self, model: str, version: str) -> dict[str, Any]:
        """Returns the statistics of a model. Raises HostError."""
        return self._read(f"{model_path(model, version)}/stats", _Statistics)

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """Sends a body. Raises HostError, also for an error of the server."""
        return self._client.post(path, body, headers)

    def _read(self, path: str, form: type) -> dict[str, Any]:
        """Returns a document that has this form, with all that it has beside. Raises HostError."""
        document = self._client.read(path, dict[str, Any])
        try:
            msgspec.convert(document, form)
        except msgspec.ValidationError as error:
            raise self._client.unexpected_answer() from error
        return document

    def infer(self, request: Inference, decoupled: bool) -> Iterator[InferenceResponse]:
        """Sends a request and yields its response. Raises HostError."""
        if decoupled:
            raise unsupported(
                f"model '{request.model}' is decoupled: HTTP has no streams of tensors; use the"
                " address of the gRPC port, grpc://HOST:PORT"
            )
        contents = [content_of(tensor) for tensor in request.inputs]
        header = json.dumps(request_header(request, contents)).encode()
        answer = self._client.post(
            f"{model_path(request.model, request.version)}/infer",
            b"".join([header, *contents]),
            {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))},
        )
        try:
            yield _read_response(answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._client.unexpected_answer() from error


def model_path(model: str, version: str) -> str:
    """Returns the path of a model on the HTTP port."""
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{version}" if version else path


def request_header(request: Inference, contents: Sequence[bytes]) -> dict[str, Any]:
    """Returns the JSON before the contents of the inputs, as HTTP has it."""
    header: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name(),
                "datatype": datatype_of(tensor),
                "shape": tensor.shape(),
                "parameters": {"binary_data_size": len(content)},
            }
            for tensor, content in zip(request.inputs, contents, strict=True)
        ],
        "parameters": {**request.parameters, "binary_data_output": True},
    }
    if request.id:
        header["id"] = request.id
    if request.outputs:
        header["parameters"].pop("binary_data_output")
        header["outputs"] = [
            {"name": name, "parameters": {"binary_data": True}} for name in request.outputs
        ]
    return header


def _read_response(answer: HttpAnswer) -> InferenceResponse:
    """Reads a response. Raises an error of a wrong type, key or value for another document."""
    length = int(answer.headers.get(HEADER_LENGTH.lower(), len(answer.body)))
    header = json.loads(answer.body[:length])
    outputs: list[Tensor] = []
    position = length
    for output in header["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            outputs.append(_tensor(output))
        else:
            content = answer.body[position : position + size]
            outputs.append(
                received_tensor(output["name"], output["datatype"], output["shape"], content)
            )
            position += size
    return response_of(outputs, header.get("parameters", {}))


def _tensor(output: Mapping[str, Any]) -> Tensor:
    return tensor_of_values(output["name"], output["datatype"], output["shape"], output["data"])
