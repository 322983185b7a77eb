"""Decodes `ModelInferRequest` without copying tensors.

Source of texts and codes: docs/reference/grpc.md, "Parameters of ModelInferRequest" and "Input
data", and docs/reference/http.md, "Classification".

Protobuf parses only small sub-messages here, so the time does not depend on the size of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError, invalid_argument
from host.frontends.grpc.contents import MIN_LARGE_INPUT_BYTES, ContentsConverter, LargeInput
from host.frontends.grpc.field_limits import (
    MIN_CHECKED_BYTES,
    TensorCounts,
    check_field_counts,
    no_tensor_counts,
)
from host.frontends.grpc.protobuf_wire import (
    LENGTH_DELIMITED,
    LONGEST_LENGTH,
    RAW_TAG,
    PlacedMessage,
    encode_varint,
    read_varint,
)
from host.frontends.inference_core import RegionLookup
from host.inference.request import (
    Buffer,
    Classification,
    InferRequest,
    KnownShapes,
    Parameter,
    RequestShape,
    Tensor,
    checked_correlation_text,
)
from host.instances.regions import RegionPart
from host.lane import message_reader
from host.models.registry import parse_version
from stub.wire.arena import Block

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"

_SHARED_MEMORY_OFFSET = "shared_memory_offset"
_UINT64 = 0xFFFFFFFFFFFFFFFF


def apply_parameters(parameters: Mapping[str, Any], request: InferRequest) -> None:
    """Sets known parameters in `request`, and adds the others to its `parameters`.

    Raises HostError INVALID_ARG, or UNSUPPORTED for a correlation id that is too long.
    """
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key == "sequence_id":
            if kind == "int64_param":
                request.correlation_id = value.int64_param & _UINT64
            elif kind == "string_param":
                request.correlation_id = checked_correlation_text(value.string_param)
            else:
                raise _type_error(key, "int64_param or string_param")
        elif key in ("sequence_start", "sequence_end"):
            if kind != "bool_param":
                raise _type_error(key, "bool_param")
            if value.bool_param:
                request.flags |= 1 if key == "sequence_start" else 2
        elif key == "priority":
            request.priority = _priority(kind, value)
        elif key == "timeout":
            if kind != "int64_param":
                raise _type_error(key, "int64_param")
            request.timeout_us = value.int64_param & _UINT64
        elif key == EMPTY_FINAL_RESPONSE:
            if kind != "bool_param":
                raise _type_error(key, "bool_param")
            request.wants_empty_final = value.bool_param
        else:
            request.parameters[key] = _custom_parameter(key, kind, value)


def _priority(kind: str | None, value: Any) -> int:
    if kind == "uint64_param":
        return int(value.uint64_param)
    if kind != "int64_param":
        raise _type_error("priority", "int64_param or uint64_param")
    if value.int64_param < 0:
        raise invalid_argument("invalid value for 'priority', expected value >= 0.")
    return int(value.int64_param)


def _custom_parameter(key: str, kind: str | None, value: Any) -> Parameter:
    if key.startswith("triton_"):
        raise invalid_argument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
            f"following keys starting with 'triton_' are allowed: {EMPTY_FINAL_RESPONSE}"
        )
    if kind is None or kind == "uint64_param":
        raise _type_error(key, "int64_param, bool_param, or string_param")
    parameter: Parameter = getattr(value, kind)
    return parameter


def _type_error(key: str, expected: str) -> HostError:
    return invalid_argument(f"invalid value type for '{key}' parameter, expected {expected}.")


def shared_memory_part(tensor: str, parameters: Mapping[str, Any]) -> RegionPart | None:
    """The place of a tensor in shared memory, if it has one. Raises HostError INVALID_ARG."""
    region = None
    if "shared_memory_region" in parameters:
        _require_kind(tensor, parameters, "shared_memory_region", "string_param")
        region = str(parameters["shared_memory_region"].string_param)
    for key in (_SHARED_MEMORY_OFFSET, "shared_memory_byte_size"):
        if key in parameters:
            if region is None:
                raise invalid_argument(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for "
                    f"tensor '{tensor}'"
                )
            _require_kind(tensor, parameters, key, "int64_param")
    if region is not None and "shared_memory_byte_size" not in parameters:
        raise invalid_argument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    if region is None:
        return None
    offset = (
        parameters["shared_memory_offset"].int64_param if _SHARED_MEMORY_OFFSET in parameters else 0
    )
    return RegionPart(region, offset, parameters["shared_memory_byte_size"].int64_param)


def _require_kind(tensor: str, parameters: Mapping[str, Any], key: str, kind: str) -> None:
    if parameters[key].WhichOneof("parameter_choice") != kind:
        raise invalid_argument(
            f"invalid value type for '{key}' parameter for tensor '{tensor}', expected {kind}."
        )


def output_options(name: str, parameters: Mapping[str, Any]) -> tuple[RegionPart | None, int]:
    """The place of an output in shared memory, and the number of its top classes, or 0.

    Raises HostError INVALID_ARG.
    """
    part = shared_memory_part(name, parameters)
    class_count = 0
    if "classification" in parameters:
        value = parameters["classification"]
        if value.WhichOneof("parameter_choice") != "int64_param":
            raise invalid_argument(
                "invalid value type for 'classification' parameter, expected int64_param"
            )
        if value.int64_param <= 0:
            raise invalid_argument("invalid value for 'classification' parameter, expected >= 0")
        if part is not None:
            raise invalid_argument(
                "output can't set both 'shared_memory_region' and 'classification'"
            )
        class_count = value.int64_param
    return part, class_count


_MAX_DESCRIBED = 256  # models and versions
_MAX_SHAPES = 1024
_REQUEST_FIELDS = pb.ModelInferRequest.DESCRIPTOR.fields_by_name
MIN_VIEW_BYTES = 8192  # bytes of a message; below that, a copied slice is cheaper than a memoryview


def _tag(name: str) -> int:
    return int(_REQUEST_FIELDS[name].number) << 3 | LENGTH_DELIMITED


_MODEL_NAME_TAG = _tag("model_name")
MODEL_VERSION_TAG = _tag("model_version")
ID_TAG = _tag("id")
_PARAMETERS_TAG = _tag("parameters")
_INPUTS_TAG = _tag("inputs")
_OUTPUTS_TAG = _tag("outputs")

ParsedInput = tuple[str, str, tuple[int, ...], Any]
"""Name, datatype, shape, and the InferInputTensor itself if it has parameters or contents; a
LargeInput if these are large."""

ParsedOutput = tuple[str, Any]
"""Name, and the InferRequestedOutputTensor itself if it has parameters."""


@dataclass(slots=True)
class InferMessage:
    """A ModelInferRequest, parsed but not interpreted.

    `raw`: one buffer for each entry of `raw_input_contents`; views if the message is large, or the
    block of shared memory in which it is.
    """

    model_name: str = ""
    model_version: str = ""
    id: str = ""
    inputs: list[ParsedInput] = field(default_factory=list)
    outputs: list[ParsedOutput] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)  # values: InferParameter
    raw: list[Buffer | Block] = field(default_factory=list)

    @property
    def large_inputs(self) -> list[LargeInput]:
        """Inputs that must be decoded, in a thread, before `to_request`."""
        return [head[3] for head in self.inputs if isinstance(head[3], LargeInput)]


class Shapes(dict[bytes, RequestShape]):
    """The shapes of recent requests, by their fields but id, parameters and contents.

    Attributes:
        placed: The shapes of those whose large tensors are in shared memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.placed = KnownShapes()

    def __missing__(self, fields: bytes) -> RequestShape:
        if len(self) >= _MAX_SHAPES:
            del self[next(iter(self))]
        shape = self[fields] = RequestShape()
        return shape


read_usual_request: Callable[[bytes, Shapes], InferRequest | None] | None = None
"""Parses and interprets a usual ModelInferRequest in compiled code, if that is there.

Returns None for others.
"""
if message_reader is not None:
    read_usual_request = message_reader(InferRequest, Tensor, MIN_VIEW_BYTES).parse_request


def read_placed_request(data: bytes, shapes: Shapes) -> InferRequest | None:
    """As `read_usual_request`, for a PlacedMessage: that one reads its tensors without content."""
    assert read_usual_request is not None and isinstance(data, PlacedMessage)
    parts: list[bytes] = []
    end = 0
    for position, block in data.blocks.items():
        size = encode_varint(block.size)
        start = position - len(size)
        if data[start:position] != size:
            return None
        parts += (data[end:start], b"\0")
        end = position
    request = read_usual_request(b"".join((*parts, data[end:])), shapes)
    if request is None:
        return None
    empty = [tensor for tensor in request.inputs if not len(tensor.data)]
    if len(empty) != len(data.blocks):
        return None
    for tensor, block in zip(empty, data.blocks.values(), strict=True):
        tensor.data, tensor.owner = block.data, block
    request.shape = shapes.placed.find(request)
    return request


@functools.lru_cache(_MAX_DESCRIBED)
def describe_usual_request(model_name: str, version: int) -> InferMessage:
    """The message of a usual request, without its id, tensors and parameters."""
    return InferMessage(model_name, str(version) if version >= 0 else "")


def read_model_name(data: bytes) -> str:
    """The model of a ModelInferRequest as clients encode it; "" if another field comes first."""
    if len(data) < 2 or data[0] != _MODEL_NAME_TAG:
        return ""
    length = data[1]  # of a varint with one byte: longer names are decoded with the rest
    return data[2 : 2 + length].decode("utf-8", "replace") if length < 128 else ""


def parse_infer_request(
    data: bytes, tensor_counts: TensorCounts = no_tensor_counts
) -> InferMessage:
    """Parses a ModelInferRequest; large tensors are views of `data`.

    Raises HostError INVALID_ARG for an invalid message, or for one with too many fields.
    """
    blocks = data.blocks if isinstance(data, PlacedMessage) else {}
    if len(data) >= MIN_CHECKED_BYTES:
        check_field_counts(data, tensor_counts, blocks)
    try:
        return _parse_fields(data, blocks)
    except (LookupError, ValueError, DecodeError):
        pass
    # An unknown field, an unusual encoding, or garbage: protobuf decides. What it accepts is parsed
    # in its canonical form.
    if isinstance(data, PlacedMessage):
        data = data.whole()
    try:
        message = pb.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise invalid_argument(f"failed to parse the ModelInferRequest message: {error}") from None
    message.DiscardUnknownFields()
    return _parse_fields(message.SerializeToString(), {})


def _parse_fields(data: bytes, blocks: dict[int, Block]) -> InferMessage:
    """Parses the top-level fields. Raises LookupError, ValueError or DecodeError for others."""
    name = version = request_id = ""
    inputs: list[ParsedInput] = []
    outputs: list[ParsedOutput] = []
    parameters: dict[str, Any] = {}
    raw: list[Buffer | Block] = []
    view: Buffer = data if len(data) < MIN_VIEW_BYTES else memoryview(data)
    position, end = 0, len(data)
    while position < end:
        tag = data[position]
        length = data[position + 1]
        position += 2
        if length > 127:
            length, position = read_varint(data, position - 1, LONGEST_LENGTH)
        start = position
        if blocks and (block := blocks.get(start)) is not None:
            raw.append(block)
            continue
        position += length
        if position > end:
            raise ValueError("a field runs past the end of the message")
        if tag == RAW_TAG:
            raw.append(view[start:position])
        elif tag == _INPUTS_TAG:
            if length >= MIN_LARGE_INPUT_BYTES:
                inputs.append(_parse_large_input(memoryview(data)[start:position]))
            else:
                inputs.append(_parse_input(data[start:position]))
        elif tag == _OUTPUTS_TAG:
            outputs.append(_parse_output(data[start:position]))
        elif tag == _MODEL_NAME_TAG:
            name = data[start:position].decode()
        elif tag == MODEL_VERSION_TAG:
            version = data[start:position].decode()
        elif tag == ID_TAG:
            request_id = data[start:position].decode()
        elif tag == _PARAMETERS_TAG:
            entry = pb.ModelInferRequest.ParametersEntry.FromString(data[start:position])
            if len(UnknownFieldSet(entry)):  # then protobuf drops the entry
                raise LookupError(tag)
            parameters[entry.key] = entry.value
        else:
            raise LookupError(tag)
    return InferMessage(name, version, request_id, inputs, outputs, parameters, raw)


def _parse_large_input(data: memoryview) -> ParsedInput:
    large = LargeInput.parse(data)
    if large is None:
        return _parse_input(bytes(data))
    return large.name, large.datatype, large.shape, large


def _parse_input(data: bytes) -> ParsedInput:
    message = pb.ModelInferRequest.InferInputTensor.FromString(data)
    full_message = message.HasField("contents") or len(message.parameters) > 0
    return message.name, message.datatype, tuple(message.shape), message if full_message else None


def _parse_output(data: bytes) -> ParsedOutput:
    message = pb.ModelInferRequest.InferRequestedOutputTensor.FromString(data)
    return message.name, message if message.parameters else None


def to_request(message: InferMessage, regions: RegionLookup) -> InferRequest:
    """Interprets a message.

    Raises HostError INVALID_ARG or UNSUPPORTED with the texts of docs/reference/grpc.md,
    "Parameters of ModelInferRequest" and "Input data", or NOT_FOUND for a shared memory region. The
    order of checks is: version, parameters, duplicates, data, outputs. The caller looks the model
    up between the first two.
    """
    version = parse_version(message.model_version) if message.model_version else -1
    request = InferRequest(message.model_name, [], version, message.id)
    if message.parameters:
        apply_parameters(message.parameters, request)
    if len(message.inputs) > 1:
        _check_duplicates("input", [head[0] for head in message.inputs], message.id)
    if message.outputs:
        request.requested_outputs = [head[0] for head in message.outputs]
        if len(message.outputs) > 1:
            _check_duplicates("output", request.requested_outputs, message.id)
    _add_inputs(message, request, regions)
    for name, output in message.outputs:
        if output is not None:
            region_part, class_count = output_options(name, output.parameters)
            if region_part is not None:
                request.output_placement = request.output_placement or {}
                request.output_placement[name] = regions.find_block(*region_part)
            if class_count:
                request.classification = request.classification or Classification({})
                request.classification.counts[name] = class_count
    return request


def _check_duplicates(kind: str, names: list[str], request_id: str) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise invalid_argument(
                f"[request id: {request_id or '<id_unknown>'}] "
                f"{kind} '{name}' already exists in request"
            )
        seen.add(name)


def _add_inputs(message: InferMessage, request: InferRequest, regions: RegionLookup) -> None:
    model, raw, raw_index = message.model_name, message.raw, 0
    for name, datatype, shape, full_message in message.inputs:
        if full_message is not None:
            region_part = shared_memory_part(name, full_message.parameters)
            if region_part is not None:
                if _has_contents(full_message):
                    raise invalid_argument(
                        "unexpected 'content' provided when using shared memory for input tensor "
                        f"'{name}' for model '{model}'"
                    )
                request.inputs.append(
                    _shared_memory_input(name, datatype, list(shape), region_part, regions)
                )
                continue
            if _has_contents(full_message):
                if raw:
                    raise invalid_argument(
                        "contents field must not be specified when using raw_input_contents for "
                        f"'{name}' for model '{model}'"
                    )
                data = _convert_contents(full_message, model)
                request.inputs.append(Tensor(name, datatype, list(shape), data))
                continue
        if raw_index == len(raw):
            raise invalid_argument(
                f"unable to find data for input tensor '{name}' for model '{model}' in request."
            )
        content = raw[raw_index]
        raw_index += 1
        if isinstance(content, Block):
            request.inputs.append(Tensor(name, datatype, list(shape), content.data, content))
        else:
            request.inputs.append(Tensor(name, datatype, list(shape), content))


def _convert_contents(full_message: Any, model: str) -> Buffer:
    if isinstance(full_message, LargeInput):
        return full_message.data()
    converter = ContentsConverter(full_message.name, full_message.datatype, model)
    return converter.convert(full_message.contents)


def _has_contents(full_message: Any) -> bool:
    return isinstance(full_message, LargeInput) or full_message.HasField("contents")


def _shared_memory_input(
    name: str, datatype: str, shape: list[int], region_part: RegionPart, regions: RegionLookup
) -> Tensor:
    """An input in shared memory of a client."""
    block = regions.find_block(*region_part)
    return Tensor(name, datatype, shape, block, block)
