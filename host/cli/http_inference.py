"""Sends inference requests of `pbhost infer` over HTTP, with tensors in binary form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from host.cli.inference import (
    Inference,
    content_of,
    datatype_of,
    received_tensor,
    response_of,
    tensor_of_values,
)
from host.cli.server_client import HttpAnswer, ServerClient
from host.errors import unsupported
from pb_utils import InferenceResponse, Tensor


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


_HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpInferenceClient:
    """Asks the HTTP port of a server (docs/reference/protocol.md, "HTTP/REST")."""

    def __init__(self, url: str, headers: Sequence[str], timeout: float) -> None:
        self._client = ServerClient(url, headers, timeout)

    def read_config(self, model: str, version: str) -> dict[str, Any]:
        """Returns the configuration of a model. Raises HostError."""
        return self._read(f"{_path(model, version)}/config", _Config)

    def read_metadata(self, model: str, version: str) -> dict[str, Any]:
        """Returns the metadata of a model. Raises HostError."""
        return self._read(_path(model, version), _Metadata)

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
        header = json.dumps(_request_header(request, contents)).encode()
        answer = self._client.post(
            f"{_path(request.model, request.version)}/infer",
            b"".join([header, *contents]),
            {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))},
        )
        try:
            yield _read_response(answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._client.unexpected_answer() from error


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{version}" if version else path


def _request_header(request: Inference, contents: Sequence[bytes]) -> dict[str, Any]:
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
    length = int(answer.headers.get(_HEADER_LENGTH.lower(), len(answer.body)))
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
