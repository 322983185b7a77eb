"""Encodes `ModelInferResponse` and `ModelStreamInferResponse`.

Protobuf messages are concatenations of their fields, so a response is one join of cached
descriptions (model, outputs) and tensor bytes. Measured with one output: 64 bytes take 2 µs instead
of 6 µs with protobuf objects, 4 MiB 0.2 ms instead of 16 ms; so there is no second path.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError, internal, invalid_argument
from host.frontends.grpc.protobuf_wire import SINGLE_BYTES, encode_varint
from host.inference.request import Buffer, InferResponse, Parameter, read_bytes
from host.lane import encode_response

MAX_MESSAGE_BYTES = 2147483647  # INT32_MAX, the limit of gRPC

_LENGTH_DELIMITED = 2
_MAX_HEADS = 2048  # encoded descriptions of models and outputs


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


def encode_infer_response(response: InferResponse, stream_final: bool | None = None) -> bytes:
    """Encodes a ModelInferResponse; `raw_output_contents` has one entry for each output.

    `stream_final`: encodes a ModelStreamInferResponse with it; this is its response parameter
    `triton_final_response`. The response has no error. Raises HostError INVALID_ARG if it is larger
    than gRPC allows (docs/reference/grpc.md, "ModelInferResponse").
    """
    flag = None if stream_final is None else _FINAL_FLAGS[stream_final]
    if encode_response is not None:
        message = encode_response(response, _heads, flag)
        if message is not None:
            return message
    try:
        described: tuple[Any, ...] = (response.model_name, response.model_version)
        parts: list[Buffer] = [b""]  # for the head
        sized = flag is not None
        for tensor in response.outputs:
            described += (tensor.name, tensor.datatype, *tensor.shape)
            data = tensor.data
            if type(data) is not bytes:
                view = memoryview(read_bytes(data))  # maybe of items that are larger than a byte
                data = view.cast("B") if view.nbytes else b""
            length = len(data)
            if length < 128:
                parts.append(_RAW_TAGS[length])
            else:
                parts.append(_RAW_TAG + encode_varint(length))
                sized = True
            parts.append(data)
        head = _heads.get(described) or _describe(described, response)
        if response.id:
            request_id = response.id.encode("utf-8", "replace")  # surrogates become question marks
            length = len(request_id)
            tag = _ID_TAGS[length] if length < 128 else _ID_TAG + encode_varint(length)
            head += tag + request_id
        if response.parameters:
            head += _parameters(response.parameters)
    except (TypeError, ValueError, BufferError) as error:  # a name, a shape, a value
        raise internal(
            f"response of model '{response.model_name}' cannot be sent: {error}"
        ) from None
    parts[0] = head
    if sized:
        size = sum(map(len, parts))
        if flag is not None:
            start = _INFER_RESPONSE_TAG + encode_varint(size + len(flag)) + flag
            parts.insert(0, start)
            size += len(start)
        if size > MAX_MESSAGE_BYTES:
            raise _too_large(size)
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
    `final` as `triton_final_response` (docs/reference/grpc.md, "ModelStreamInfer"). An empty
    text is no error.
    """
    answer = b"".join(
        (
            _serialize(pb.ModelInferResponse(model_name=model_name, model_version=model_version)),
            _string_field(_ID_TAG, request_id),
            _FINAL_FLAGS[final],
        )
    )
    return (
        _string_field(_ERROR_MESSAGE_TAG, error_message)
        + _INFER_RESPONSE_TAG
        + encode_varint(len(answer))
        + answer
    )


_heads: dict[tuple[Any, ...], bytes] = {}  # the fields with the model and its outputs


def _describe(described: tuple[Any, ...], response: InferResponse) -> bytes:
    """Encodes the model, and name, datatype and shape of each output: what is `described`."""
    message = pb.ModelInferResponse(
        model_name=response.model_name, model_version=str(response.model_version)
    )
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    if len(_heads) >= _MAX_HEADS:
        del _heads[next(iter(_heads))]
    head = _heads[described] = _serialize(message)
    return head


def _parameters(parameters: dict[str, Parameter]) -> bytes:
    message = pb.ModelInferResponse()
    for key, value in parameters.items():
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


def _string_field(tag: bytes, text: str) -> bytes:
    """A string field; surrogates, which protobuf cannot carry, become question marks."""
    data = text.encode("utf-8", "replace")
    return tag + encode_varint(len(data)) + data if data else b""


_RAW_TAGS = tuple(_RAW_TAG + length for length in SINGLE_BYTES)
_ID_TAGS = tuple(_ID_TAG + length for length in SINGLE_BYTES)


def _too_large(size: int) -> HostError:
    return invalid_argument(
        f"Response has byte size {size} which exceeds gRPC's byte size limit {MAX_MESSAGE_BYTES}."
    )
