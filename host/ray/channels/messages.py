"""Requests and responses as Ray carries them between deployments.

A message is a head of plain values, and one buffer for each tensor. Ray Serve passes arguments and
results by reference: large arrays are written to the object store once, and read there in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from host.config.schema import pb
from host.errors import ErrorCode, HostError
from host.inference.request import InferRequest, InferResponse, Parameter, Tensor
from host.inference.shared_memory_bytes import read_bytes
from host.remote.provider import RemoteVersion

LARGE_BYTES = 1 << 20
"""From this size, a tensor is an array, which Ray keeps out of the pickled message."""

_CODES = {code.value for code in ErrorCode}

TensorHead = tuple[str, str, list[int]]
"""Name, datatype and shape of a tensor."""


@dataclass(frozen=True)
class Refusal:
    """An error of another deployment; Ray's own errors have no codes."""

    code: str
    message: str

    @classmethod
    def from_error(cls, error: HostError) -> Refusal:
        """What is sent for an error."""
        return cls(error.code.value, error.message)

    def to_error(self) -> HostError:
        """The error again; a code that this version does not know becomes UNKNOWN."""
        if self.code not in _CODES:
            return HostError(ErrorCode.UNKNOWN, f"{self.code}: {self.message}")
        return HostError(ErrorCode(self.code), self.message)


@dataclass(frozen=True)
class RequestHead:
    """A request without the contents of its tensors; `headers`: the W3C trace context."""

    fields: tuple[Any, ...]
    tensors: list[TensorHead]
    headers: dict[str, str]


@dataclass(frozen=True)
class ResponseHead:
    """A response without the contents of its tensors; None is an end without a response."""

    model: str
    version: int
    id: str
    parameters: dict[str, Parameter]
    error: Refusal | None
    tensors: list[TensorHead]


PackedResponse = tuple[Any, ...]
"""A ResponseHead or None, whether it is the last one, and the buffers of its tensors."""

_FIELDS = (
    "model_name",
    "model_version",
    "id",
    "requested_outputs",
    "parameters",
    "correlation_id",
    "flags",
    "priority",
    "timeout_us",
    "max_outstanding_responses",
    "ancestors",
)


PackedVersion = tuple[int, bytes, dict[str, list[str]], bool, str]
"""The fields of a RemoteVersion; protobuf messages cannot be pickled."""


def pack_version(version: RemoteVersion) -> PackedVersion:
    """A version of a model with an encoded configuration."""
    labels = {name: list(names) for name, names in version.labels.items()}
    config: bytes = version.config.SerializeToString()
    return version.version, config, labels, version.defines_is_ready, version.reason


def unpack_version(packed: PackedVersion) -> RemoteVersion:
    """The version again."""
    number, config, labels, defines_is_ready, reason = packed
    return RemoteVersion(
        number, pb.ModelConfig.FromString(config), labels, defines_is_ready, reason
    )


def pack_request(request: InferRequest, headers: Mapping[str, str]) -> tuple[Any, ...]:
    """The head of a request, and the buffers of its tensors, which are views of their memory."""
    fields = tuple([getattr(request, name) for name in _FIELDS])
    head = RequestHead(fields, _heads(request.inputs), dict(headers))
    return (head, *[_buffer(read_bytes(tensor.data)) for tensor in request.inputs])


def unpack_request(head: RequestHead, buffers: Sequence[Any]) -> InferRequest:
    """The request; its tensors are views of the buffers."""
    fields = dict(zip(_FIELDS, head.fields, strict=True))
    return InferRequest(inputs=_tensors(head.tensors, buffers), **fields)


def pack_response(response: InferResponse | None, final: bool) -> PackedResponse:
    """A response with copies of its tensors: their memory is used again before Ray sends them."""
    if response is None:
        return None, final
    error = None if response.error is None else Refusal.from_error(response.error)
    head = ResponseHead(
        response.model_name,
        response.model_version,
        response.id,
        response.parameters,
        error,
        _heads(response.outputs),
    )
    return (head, final, *[_buffer(bytes(read_bytes(one.data))) for one in response.outputs])


def unpack_response(packed: PackedResponse) -> tuple[InferResponse | None, bool]:
    """The response, whose tensors are views of the buffers, and whether it is the last one."""
    head, final, *buffers = packed
    if head is None:
        return None, final
    response = InferResponse(
        head.model,
        head.version,
        head.id,
        _tensors(head.tensors, buffers),
        head.parameters,
        None if head.error is None else head.error.to_error(),
    )
    return response, final


def _heads(tensors: Sequence[Tensor]) -> list[TensorHead]:
    return [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in tensors]


def _buffer(data: bytes | memoryview) -> object:
    if len(data) >= LARGE_BYTES:
        return np.frombuffer(data, np.uint8)
    return data if isinstance(data, bytes) else bytes(data)


def _tensors(heads: Sequence[TensorHead], buffers: Sequence[Any]) -> list[Tensor]:
    return [
        Tensor(name, datatype, shape, memoryview(buffer).cast("B"), buffer)
        for (name, datatype, shape), buffer in zip(heads, buffers, strict=True)
    ]
