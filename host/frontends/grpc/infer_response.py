"""Encodes `ModelInferResponse` and `ModelStreamInferResponse`.

Protobuf messages are concatenations of their fields, so a response is one join of cached
descriptions (model, outputs) and tensor bytes. Measured with one output: 64 bytes take 2 µs instead
of 6 µs with protobuf objects, 4 MiB 0.2 ms instead of 16 ms; so there is no second path.
"""

from __future__ import annotations

import functools
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError, internal, invalid_argument
from host.inference.request import Buffer, InferResponse, Parameter
from host.inference.shared_memory_bytes import read_bytes

MAX_MESSAGE_BYTES = 2147483647  # INT32_MAX, the limit of gRPC

_LENGTH_DELIMITED = 2
_CACHE_SIZE = 2048  # descriptions of each kind


def _tag(message: Any, name: str) -> bytes:
    return bytes((int(message.DESCRIPTOR.fields_by_name[name].number) << 3 | _LENGTH_DELIMITED,))


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _final_flag(value: bool) -> bytes:
    final = pb.InferParameter(bool_param=value)
    return _serialize(pb.ModelInferResponse(parameters={"triton_final_response": final}))


_ID_TAG = _tag(pb.ModelInferResponse, "id")
_RAW_TAG = _tag(pb.ModelInferResponse, "raw_output_contents")
_ERROR_MESSAGE_TAG = _tag(pb.ModelStreamInferResponse, "error_message")
_INFER_RESPONSE_TAG = _tag(pb.ModelStreamInferResponse, "infer_response")
_FINAL_FLAGS = {None: b"", False: _final_flag(False), True: _final_flag(True)}


def encode_infer_response(response: InferResponse) -> bytes:
    """Encodes a ModelInferResponse; `raw_output_contents` has one entry for each output.

    Raises HostError INVALID_ARG if it is larger than gRPC allows (docs/reference/protocol.md,
    "ModelInferResponse").
    """
    short = _encode_small(response, b"")
    if short is not None:
        return short
    parts, size = _response_parts(response)
    _check_size(size)
    return b"".join(parts)


def encode_stream_response(response: InferResponse, final: bool) -> bytes:
    """Encodes a ModelStreamInferResponse with a response that has no error.

    `final`: the response parameter `triton_final_response`. Raises HostError INVALID_ARG if it is
    larger than gRPC allows.
    """
    flag = _FINAL_FLAGS[final]
    short = _encode_small(response, flag)
    if short is not None:
        return b"%b%b%b" % (_INFER_RESPONSE_TAG, _varint(len(short)), short)
    parts, size = _response_parts(response)
    prefix = _INFER_RESPONSE_TAG + _varint(size + len(flag)) + flag
    _check_size(size + len(prefix))
    parts.insert(0, prefix)
    return b"".join(parts)


def encode_empty_stream_response(
    error_message: str,
    request_id: str,
    model_name: str = "",
    model_version: str = "",
    final: bool | None = None,
) -> bytes:
    """Encodes a ModelStreamInferResponse without outputs: an error, or an empty last response.

    An early error has only the id; other messages have model and version as in the request, and
    `final` as `triton_final_response` (docs/reference/protocol.md, "ModelStreamInfer"). An empty
    text is no error.
    """
    answer = b"".join(
        (
            _model_fields(model_name, model_version),
            _string_field(_ID_TAG, request_id),
            _FINAL_FLAGS[final],
        )
    )
    return (
        _string_field(_ERROR_MESSAGE_TAG, error_message)
        + _INFER_RESPONSE_TAG
        + _varint(len(answer))
        + answer
    )


def _encode_small(response: InferResponse, flag: bytes) -> bytes | None:
    """The fast path for the responses of most models; None for others and for invalid ones."""
    outputs = response.outputs
    if len(outputs) != 1:
        return None
    tensor = outputs[0]
    data = tensor.data
    if type(data) is not bytes or len(data) > 127:
        return None
    try:
        head = _model_and_output_fields(
            response.model_name,
            response.model_version,
            tensor.name,
            tensor.datatype,
            tuple(tensor.shape),
        )
        if response.parameters:
            head += _parameters(response.parameters)
    except (TypeError, ValueError):
        return None  # the slow path reports the error
    number = _string_field(_ID_TAG, response.id) if response.id else b""
    return b"%b%b%b%b%b%b" % (flag, head, number, _RAW_TAG, _SINGLE_BYTES[len(data)], data)


def _response_parts(response: InferResponse) -> tuple[list[Buffer], int]:
    """The parts of a ModelInferResponse, and their total size in bytes."""
    try:
        return _collect_parts(response)
    except (TypeError, ValueError, BufferError) as error:  # a name, a shape, a value
        raise internal(
            f"response of model '{response.model_name}' cannot be sent: {error}"
        ) from None


def _collect_parts(response: InferResponse) -> tuple[list[Buffer], int]:
    parts: list[Buffer] = [_model_fields(response.model_name, str(response.model_version))]
    if response.id:
        parts.append(_string_field(_ID_TAG, response.id))
    if response.parameters:
        parts.append(_parameters(response.parameters))
    size = 0
    raw: list[Buffer] = []
    for tensor in response.outputs:
        parts.append(_output_field(tensor.name, tensor.datatype, tuple(tensor.shape)))
        data = read_bytes(tensor.data)
        length = len(data) if type(data) is bytes else memoryview(data).nbytes
        raw.append(_RAW_TAG + _varint(length))
        raw.append(data)
        size += length - len(data)  # zero, except for views of items larger than a byte
    parts += raw
    return parts, size + sum(map(len, parts))


@functools.lru_cache(_CACHE_SIZE)
def _model_and_output_fields(
    model: str, version: int, name: str, datatype: str, shape: tuple[int, ...]
) -> bytes:
    return _model_fields(model, str(version)) + _output_field(name, datatype, shape)


@functools.lru_cache(_CACHE_SIZE)
def _model_fields(name: str, version: str) -> bytes:
    return _serialize(pb.ModelInferResponse(model_name=name, model_version=version))


@functools.lru_cache(_CACHE_SIZE)
def _output_field(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    output = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    return _serialize(pb.ModelInferResponse(outputs=[output]))


def _parameters(parameters: dict[str, Parameter]) -> bytes:
    return b"".join(
        [
            _parameter(key, value) if isinstance(value, str) else _cached_parameter(key, value)
            for key, value in parameters.items()
        ]
    )


def _parameter(key: str, value: Parameter) -> bytes:
    message = pb.ModelInferResponse()
    entry = message.parameters[key]
    if isinstance(value, bool):
        entry.bool_param = value
    elif isinstance(value, int):
        entry.int64_param = value
    elif isinstance(value, float):
        entry.double_param = value
    else:
        entry.string_param = value
    return _serialize(message)


# True, 1 and 1.0 are equal. Texts are not cached, as they may be long.
_cached_parameter = functools.lru_cache(_CACHE_SIZE, typed=True)(_parameter)


def _string_field(tag: bytes, text: str) -> bytes:
    """A string field; surrogates, which protobuf cannot carry, become question marks."""
    data = text.encode("utf-8", "replace")
    return tag + _varint(len(data)) + data if data else b""


def _varint(value: int) -> bytes:
    if value < 128:
        return _SINGLE_BYTES[value]
    if value < 16384:
        return bytes((value & 127 | 128, value >> 7))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_SINGLE_BYTES = tuple(bytes((value,)) for value in range(128))


def _check_size(size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise _too_large(size)


def _too_large(size: int) -> HostError:
    return invalid_argument(
        f"Response has byte size {size} which exceeds gRPC's byte size limit {MAX_MESSAGE_BYTES}."
    )
