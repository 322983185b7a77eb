"""What connections between replicas carry: requests, responses, methods, and their frames.

A message is a head of plain values, and one buffer for each tensor. Ray Serve passes arguments and
results by reference: large arrays are written to the object store once, and read there in place.

Heads, calls of methods and their results are MessagePack. An RPC is carried as the client sent it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from host.config.schema import pb
from host.errors import ErrorCode, HostError
from host.frontends.request_headers import Header
from host.inference.request import InferRequest, InferResponse, Parameter, Tensor, read_bytes
from host.remote_models import RemoteVersion

_Result = TypeVar("_Result")


class ReplicaMethod(Generic[_Result]):
    """The name of a method, and what it takes and returns.

    `arguments`: a tuple type; `result`: a type. Both are sent as MessagePack, which has plain
    values, containers and dataclasses.
    """

    def __init__(self, name: str, arguments: Any, result: Any) -> None:
        self.name = name
        self._decode_arguments = msgspec.msgpack.Decoder(arguments).decode
        self._decode_result = msgspec.msgpack.Decoder(result).decode

    def decode_arguments(self, encoded: bytes | msgspec.Raw) -> tuple[Any, ...]:
        """The arguments of a call. Raises `host.ray.channel_messages.DECODE_ERRORS`."""
        arguments: tuple[Any, ...] = self._decode_arguments(encoded)
        return arguments

    def decode_result(self, encoded: bytes) -> _Result:
        """The result of a call. Raises `host.ray.channel_messages.DECODE_ERRORS`."""
        result: _Result = self._decode_result(encoded)
        return result


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


def checked(answer: _Result | Refusal) -> _Result:
    """The answer of another deployment. Raises HostError if that is a Refusal."""
    if isinstance(answer, Refusal):
        raise answer.to_error()
    return answer


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


_HEADER = struct.Struct("<IQB")  # bytes that follow, number of the call, kind
_LENGTH = struct.Struct("<I")
_MAX_FRAME = (1 << 32) - 1


class FrameKind(enum.IntEnum):
    """What a frame is. Clients send REQUEST, RPC, CALL, CANCEL and ACKNOWLEDGE."""

    REQUEST = 1
    CANCEL = 2
    ACKNOWLEDGE = 3
    """The client has read responses of the call; the contents say how many."""
    TAKEN = 4
    """All calls up to this number have reached the server."""
    RESPONSE = 5
    LAST_RESPONSE = 6
    REFUSAL = 7
    """The call ends with an error."""
    NOT_TAKEN = 8
    """The server stops and has not begun the call."""
    GOODBYE = 9
    """The server stops: the client sends no new calls."""
    CALL = 10
    """The call of a method; the answer is a RESULT."""
    RESULT = 11
    RPC = 12
    """A ModelInfer of a client; the answer is an RPC_RESPONSE."""
    RPC_RESPONSE = 13


RESPONSE_WINDOW = 64
"""Responses of one call that may be on their way."""
ACKNOWLEDGED_RESPONSES, ACKNOWLEDGED_BYTES = 16, 1 << 20
"""Responses, or bytes of them, that a client has read before it acknowledges them."""

Frame = tuple[int, int, bytes]
"""The kind, the number of the call, and the contents."""

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(tuple[RequestHead, list[int]]).decode
_decode_response = msgspec.msgpack.Decoder(tuple[ResponseHead | None, list[int]]).decode
_decode_refusal = msgspec.msgpack.Decoder(Refusal).decode
_decode_call = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode
_decode_metadata = msgspec.msgpack.Decoder(list[tuple[Any, Any]]).decode

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, struct.error)
"""What is raised for contents that are no such message: lists may be too deep, too."""


class FrameError(Exception):
    """The other side does not keep to the protocol."""


def encode_frame(kind: FrameKind, number: int) -> bytes:
    """A frame without contents."""
    return _HEADER.pack(0, number, kind)


def encode_contents(kind: FrameKind, number: int, contents: bytes) -> bytes:
    """A frame with contents that are encoded already."""
    return _HEADER.pack(len(contents), number, kind) + contents


def encode_message(kind: FrameKind, number: int, head: object, buffers: Sequence[Any]) -> bytes:
    """A frame with the head of a message and the buffers of its tensors.

    Raises FrameError if it is larger than 4 GiB.
    """
    encoded = _encode((head, [len(buffer) for buffer in buffers]))
    size = _LENGTH.size + len(encoded) + sum(map(len, buffers))
    if size > _MAX_FRAME:
        raise FrameError(f"a message of {size} bytes is larger than a frame ({_MAX_FRAME})")
    header = _HEADER.pack(size, number, kind)
    return b"".join([header, _LENGTH.pack(len(encoded)), encoded, *buffers])


def encode_call(number: int, name: str, arguments: tuple[Any, ...]) -> bytes:
    """The call of a method. Raises TypeError for an argument that MessagePack does not have."""
    return encode_contents(FrameKind.CALL, number, _encode((name, arguments)))


def decode_call(contents: bytes) -> tuple[str, msgspec.Raw]:
    """The name of a method, and its encoded arguments. Raises FrameError."""
    try:
        return _decode_call(contents)
    except DECODE_ERRORS as error:
        raise FrameError(f"a call cannot be decoded: {error}") from error


def encode_result(number: int, result: object) -> bytes:
    """The result of a call. Raises TypeError if MessagePack does not have it."""
    return encode_contents(FrameKind.RESULT, number, _encode(result))


def encode_rpc(number: int, message: bytes, metadata: Sequence[Header]) -> bytes:
    """A ModelInfer with the metadata of the client."""
    encoded = _encode(metadata)
    header = _HEADER.pack(_LENGTH.size + len(encoded) + len(message), number, FrameKind.RPC)
    return b"".join([header, _LENGTH.pack(len(encoded)), encoded, message])


def decode_rpc(contents: bytes) -> tuple[bytes, list[Header]]:
    """The message of a ModelInfer, and the metadata. Raises FrameError."""
    try:
        encoded, message = _split(contents)
        return bytes(message), _decode_metadata(encoded)
    except DECODE_ERRORS as error:
        raise FrameError(f"an RPC cannot be decoded: {error}") from error


def encode_acknowledgement(number: int, count: int) -> bytes:
    """A frame that says how many responses the client has read since the last one."""
    return encode_contents(FrameKind.ACKNOWLEDGE, number, _LENGTH.pack(count))


def decode_acknowledgement(contents: bytes) -> int:
    """How many responses the client has read. Raises FrameError."""
    if len(contents) != _LENGTH.size:
        raise FrameError(f"an acknowledgement has {len(contents)} bytes")
    (count,) = _LENGTH.unpack(contents)
    return int(count)


def encode_refusal(number: int, refusal: Refusal) -> bytes:
    """A frame with an error."""
    return encode_contents(FrameKind.REFUSAL, number, _encode(refusal))


class FrameReader:
    """Takes what a connection receives apart."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that are complete with `data`; it must be exhausted."""
        received = self._received
        received += data
        start = 0
        while start + _HEADER.size <= len(received):
            size, number, kind = _HEADER.unpack_from(received, start)
            end = start + _HEADER.size + size
            if end > len(received):
                break
            with memoryview(received) as view:
                contents = bytes(view[start + _HEADER.size : end])
            yield kind, number, contents
            start = end
        del received[:start]


def decode_request(contents: bytes) -> tuple[RequestHead, list[memoryview]]:
    """The head of a request, and its tensors. Raises FrameError."""
    try:
        encoded, tensors = _split(contents)
        head, sizes = _decode_request(encoded)
    except DECODE_ERRORS as error:
        raise FrameError(f"a request cannot be decoded: {error}") from error
    return head, _cut(tensors, sizes)


def decode_response(contents: bytes) -> tuple[ResponseHead | None, list[memoryview]]:
    """The head of a response, and its tensors. Raises FrameError."""
    try:
        encoded, tensors = _split(contents)
        head, sizes = _decode_response(encoded)
    except DECODE_ERRORS as error:
        raise FrameError(f"a response cannot be decoded: {error}") from error
    return head, _cut(tensors, sizes)


def decode_refusal(contents: bytes) -> Refusal:
    """The error. Raises FrameError."""
    try:
        return _decode_refusal(contents)
    except DECODE_ERRORS as error:
        raise FrameError(f"an error cannot be decoded: {error}") from error


def _split(contents: bytes) -> tuple[memoryview, memoryview]:
    view = memoryview(contents)
    (length,) = _LENGTH.unpack_from(view)
    start = _LENGTH.size + length
    return view[_LENGTH.size : start], view[start:]


def _cut(tensors: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    if sum(sizes) != len(tensors):
        raise FrameError(f"expected {sum(sizes)} bytes of tensors, got {len(tensors)}")
    parts, start = [], 0
    for size in sizes:
        parts.append(tensors[start : start + size])
        start += size
    return parts
