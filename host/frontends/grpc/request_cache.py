"""Recognises repeated requests, and answers those that the response cache has answered before.

All other bytes of such a ModelInferRequest are equal, but for the order of parameters. Where the
parser takes 18 µs for a request with one small tensor, on a slow machine, this takes 6. The
compiled lane reads usual requests without that, and only recognises their shapes. The response
cache still decides about each request whose bytes are all equal but for its id: it counts a hit, or
the request takes the usual path because the entry has been evicted.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import msgspec
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from host.cache.responses import CacheHit
from host.errors import HostError
from host.frontends.grpc.infer_request import (
    ID_TAG,
    MIN_VIEW_BYTES,
    MODEL_VERSION_TAG,
    PARAMETERS_TAG,
    SEQUENCE_PARAMETERS,
    InferMessage,
    apply_parameters,
    parse_infer_request,
    read_usual_request,
)
from host.frontends.grpc.infer_response import encode_infer_response
from host.frontends.grpc.protobuf_wire import LONGEST_LENGTH, RAW_TAG, PlacedMessage, read_varint
from host.frontends.inference_core import InferenceCore
from host.inference.request import Buffer, InferRequest, InferResponse, RequestShape, Tensor
from stub.wire.arena import Block

_NO_BLOCKS: dict[int, Block] = {}
_MAX_TEMPLATE_BYTES = 512  # bytes of a cached request without its tensors
_MAX_RECENT = 256  # names of models, and requests that arrived once
_MAX_TEMPLATES = 1024  # requests with different shapes or parameters
_MAX_SHAPES = 1024
_MAX_SEQUENCES = 1024  # recent parameters; each sequence has its own
_MAX_MISSES = 64  # requests of a model, one after the other, that match no template
_MISSES_PER_TRY = 16  # after so many; only one in this number is looked up and remembered then


class _Parameters(NamedTuple):
    """The parameters of a request: those of its sequence are decoded.

    `others`: the fields of all other parameters, sorted, as clients send them in any order.
    """

    others: bytes
    correlation_id: int | str
    flags: int


_NO_PARAMETERS = _Parameters(b"", 0, 0)


class RequestTemplate(RequestShape):
    """A request without its id, sequence and tensors.

    `prefix`: the bytes before the id. `parameters`: the fields of its parameters. `suffix`: the
    bytes after these. With one tensor only, `tensor_head` is the bytes from there to the content of
    that tensor, which has `single_input_size` bytes.
    """

    __slots__ = (
        "prefix",
        "parameters",
        "suffix",
        "parameters_and_suffix",
        "inputs",
        "message",
        "base_request",
        "has_defaults",
        "single_input_size",
        "tensor_head",
    )

    def __init__(
        self,
        prefix: bytes,
        parameters: bytes,
        suffix: bytes,
        tensor_head: bytes,
        message: InferMessage,
        request: InferRequest,
    ) -> None:
        """`message`: the parsed request."""
        super().__init__()
        self.message = message
        self.prefix = prefix
        self.parameters = parameters
        self.suffix = suffix
        self.parameters_and_suffix = parameters + suffix
        self.single_input_size = len(request.inputs[0].data) if len(request.inputs) == 1 else 0
        self.tensor_head = tensor_head if self.single_input_size else b""
        self.inputs = [(entry.name, entry.datatype, entry.shape[:]) for entry in request.inputs]
        self.base_request = InferRequest(
            request.model_name,
            [],
            request.model_version,
            requested_outputs=request.requested_outputs[:],
            parameters=request.parameters.copy(),
            priority=request.priority,
            timeout_us=request.timeout_us,
            wants_empty_final=request.wants_empty_final,
        )
        self.has_defaults = self.base_request == InferRequest(
            request.model_name,
            [],
            request.model_version,
            requested_outputs=request.requested_outputs,
        )


class Shapes(dict[bytes, RequestShape]):
    """The shapes of recent requests, by their fields but id, parameters and contents."""

    def __missing__(self, fields: bytes) -> RequestShape:
        if len(self) >= _MAX_SHAPES:
            del self[next(iter(self))]
        shape = self[fields] = RequestShape()
        return shape


class RequestCache:
    """The templates of recent requests, and the shapes of those that the compiled lane reads.

    Remembering costs more than parsing, so models whose requests do not recur are tried at times
    only.
    """

    def __init__(self) -> None:
        self._shapes = Shapes()
        # Since a request of a model has matched, by the encoded field with its name.
        self._misses: dict[bytes, int] = {}
        # By the encoded field with the model's name.
        self._last_by_model: dict[bytes, RequestTemplate] = {}
        # By the request without id, sequence and tensors.
        self._templates: dict[bytes, RequestTemplate] = {}
        self._seen_once: dict[bytes, None] = {}  # such requests that arrived once

    def lookup(self, data: bytes) -> tuple[InferRequest, InferMessage | None] | None:
        """Returns the request for a ModelInferRequest, or None if it has to be parsed.

        Large tensors are views of `data`. The message has neither the id nor the parameters of the
        sequence nor the tensors. It is None for a usual request: `describe_usual_request` makes it.
        """
        if read_usual_request is not None and type(data) is bytes:
            request = read_usual_request(data, self._shapes)
            if request is not None:
                return request, None
        try:
            model = data[: data[1] + 2]
            misses = self._misses.get(model, 0)
            if misses and not _is_tried(misses):
                self._misses[model] = misses + 1
                return None
            template = self._last_by_model.get(model)
            request = _match_template(template, data) if template is not None else None
            if request is None:
                template = self._templates.get(_template_key(data))
                if template is not None:
                    self._last_by_model[model] = template
                    request = _match_template(template, data)
        except (IndexError, UnicodeDecodeError):
            return None
        if request is None or template is None:
            if not misses and len(self._misses) >= _MAX_RECENT:
                self._misses.clear()
            self._misses[model] = misses + 1
            return None
        if misses:
            del self._misses[model]
        return request, template.message

    def remember(self, data: bytes, message: InferMessage, request: InferRequest) -> None:
        """Caches a parsed request that was not found if the next ones like it can be recognised."""
        misses = self._misses.get(data[: data[1] + 2]) if len(data) > 1 else None
        if misses is not None and not _is_tried(misses - 1):
            return
        tensors = sum(
            _field_size(raw.size) - raw.size if isinstance(raw, Block) else _field_size(len(raw))
            for raw in message.raw
        )
        if (
            not 0 < len(message.model_name.encode()) < 128
            or request.output_placement
            or request.classification
            or len(message.raw) != len(message.inputs)
            or len(data) - tensors > _MAX_TEMPLATE_BYTES
        ):
            return
        prefix = pb.ModelInferRequest(
            model_name=message.model_name, model_version=message.model_version
        ).SerializeToString()
        start = len(prefix)
        if message.id:
            start += _field_size(len(message.id.encode()))
        try:
            start, parameters = _read_parameters(data, start)
        except IndexError:
            return
        if parameters is None:
            return
        suffix = data[start : len(data) - tensors]
        key = prefix + parameters.others + suffix
        if self._first_seen(key):
            return
        try:
            rest = parse_infer_request(key)
        except HostError:
            return
        if rest != InferMessage(
            message.model_name,
            message.model_version,
            inputs=message.inputs,
            outputs=message.outputs,
            parameters={
                name: value
                for name, value in message.parameters.items()
                if name not in SEQUENCE_PARAMETERS
            },
        ):
            return  # its fields have another order
        if len(self._last_by_model) >= _MAX_RECENT:
            self._last_by_model.clear()
        if len(self._templates) >= _MAX_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        heads = data[-tensors:]
        if len(message.raw) == 1 and not isinstance(message.raw[0], Block):
            heads = heads[: len(heads) - len(message.raw[0])]
        template = RequestTemplate(prefix, parameters.others, suffix, heads, rest, request)
        self._templates[key] = self._last_by_model[data[: data[1] + 2]] = template

    def _first_seen(self, fixed: bytes) -> bool:
        """Whether a request with these bytes comes for the first time.

        Caching costs as much as parsing, and many requests come only once.
        """
        if fixed in self._seen_once:
            del self._seen_once[fixed]
            return False
        if len(self._seen_once) >= _MAX_RECENT:
            self._seen_once.clear()
        self._seen_once[fixed] = None
        return True


def _is_tried(misses: int) -> bool:
    """Whether a request is looked up and remembered after so many that have matched nothing."""
    return misses < _MAX_MISSES or not misses % _MISSES_PER_TRY


def _match_template(template: RequestTemplate, data: bytes) -> InferRequest | None:
    """The request, if it matches the template. Raises IndexError or UnicodeDecodeError."""
    # In one function, without a call for each field, as nearly every request passes through it.
    if not data.startswith(template.prefix):
        return None
    position = len(template.prefix)
    request_id = ""
    if data[position] == ID_TAG:
        start = position + 2
        position = start + data[position + 1]  # the rest of a longer one does not match
        request_id = data[start:position].decode()
    parameters = _NO_PARAMETERS
    if data.startswith(template.parameters_and_suffix, position):
        position += len(template.parameters_and_suffix)
    else:
        suffix = template.suffix
        end = data.find(suffix, position, position + _MAX_TEMPLATE_BYTES + len(suffix))
        sent = _decode_parameters(data[position:end]) if end >= 0 else None
        if sent is None or sent.others != template.parameters:
            return None
        parameters = sent
        position = end + len(suffix)
    view: Buffer = data if len(data) < MIN_VIEW_BYTES else memoryview(data)
    blocks = data.blocks if isinstance(data, PlacedMessage) else _NO_BLOCKS
    shape: RequestShape | None = None  # if the sizes of the tensors are known, too
    tensor_head = template.tensor_head
    if tensor_head and data.startswith(tensor_head, position):
        shape = template
        position += len(tensor_head)
        size = template.single_input_size
        name, datatype, dims = template.inputs[0]
        if blocks:
            block = blocks.get(position)
            if block is None or len(data) != position or block.size != size:
                return None
            inputs = [Tensor(name, datatype, dims[:], block.data, block)]
        elif len(data) != position + size:
            return None
        else:
            inputs = [Tensor(name, datatype, dims[:], view[position:])]
    else:
        inputs = []
        for name, datatype, dims in template.inputs:
            if data[position] != RAW_TAG:
                return None
            length = data[position + 1]
            position += 2
            if length > 127:
                length, position = read_varint(data, position - 1, LONGEST_LENGTH)
            block = blocks.get(position)
            if block is not None:
                inputs.append(Tensor(name, datatype, dims[:], block.data, block))
                continue
            start = position
            position += length
            inputs.append(Tensor(name, datatype, dims[:], view[start:position]))
        if position != len(data):
            return None
    base = template.base_request
    request = InferRequest(
        base.model_name,
        inputs,
        base.model_version,
        request_id,
        base.requested_outputs[:],
        shape=shape,
    )
    if parameters is not _NO_PARAMETERS:
        _, request.correlation_id, request.flags = parameters
    if not template.has_defaults:
        request.parameters = base.parameters.copy()
        request.priority = base.priority
        request.timeout_us = base.timeout_us
        request.wants_empty_final = base.wants_empty_final
    return request


def _template_key(data: bytes) -> bytes:
    """The bytes before the tensors, without id and sequence; empty if long. Raises IndexError."""
    position, end = 0, len(data)
    key, start = b"", 0
    while position < end and (tag := data[position]) != RAW_TAG:
        field = position
        if tag == PARAMETERS_TAG:
            position, parameters = _read_parameters(data, position)
            if parameters is None:
                return b""
            key += data[start:field] + parameters.others
            start = position
        else:
            position = _field_end(data, position)
            if tag == ID_TAG:
                key += data[start:field]
                start = position
        if position > 2 * _MAX_TEMPLATE_BYTES:
            return b""
    return key + data[start:position]


def _read_parameters(data: bytes, position: int) -> tuple[int, _Parameters | None]:
    """Reads the parameters that start at a position; returns their end, too. Raises IndexError.

    None if they are long or invalid.
    """
    start, end = position, len(data)
    while position < end and data[position] == PARAMETERS_TAG:
        position = _field_end(data, position)
    if position == start:
        return start, _NO_PARAMETERS
    if position > min(end, start + _MAX_TEMPLATE_BYTES):
        return position, None
    return position, _decode_parameters(data[start:position])


@functools.lru_cache(_MAX_SEQUENCES)  # most requests of a sequence have the same ones
def _decode_parameters(fields: bytes) -> _Parameters | None:
    """None if the fields are invalid, or some are no parameters."""
    position = 0
    try:
        while position < len(fields):
            if fields[position] != PARAMETERS_TAG:
                return None
            position = _field_end(fields, position)
    except IndexError:
        return None
    try:
        message = pb.ModelInferRequest.FromString(fields)
        message.DiscardUnknownFields()
        parameters = message.parameters
        request = InferRequest("", [])
        apply_parameters(
            {name: parameters[name] for name in SEQUENCE_PARAMETERS if name in parameters}, request
        )
    except (DecodeError, HostError):
        return None
    for name in SEQUENCE_PARAMETERS:
        parameters.pop(name, None)
    others = message.SerializeToString(deterministic=True)
    return _Parameters(others, request.correlation_id, request.flags)


def _field_end(data: bytes, position: int) -> int:
    """The end of a length-delimited field. Raises IndexError."""
    length = data[position + 1]
    position += 2
    if length > 127:
        length, position = read_varint(data, position - 1, LONGEST_LENGTH)
    return position + length


def _field_size(length: int) -> int:
    """Bytes of a length-delimited field whose number is below 16."""
    return 1 + max(1, -(-length.bit_length() // 7)) + length


MAX_REPEATABLE_BYTES = 1024
"""Bytes of a request whose response is kept."""

_MAX_RESPONSE_BYTES = 4096
_MAX_RESPONSES = 1024


class _CachedResponse(NamedTuple):
    model_name: str
    model_version: int
    hit: CacheHit
    message: bytes  # the ModelInferResponse without an id


class CachedResponses:
    """The encoded responses to recent requests that the response cache has answered.

    Attributes:
        responses: The responses, by the request without its id.
    """

    def __init__(self, core: InferenceCore) -> None:
        self.responses: dict[bytes, _CachedResponse] = {}
        self._core = core

    def respond(self, data: bytes) -> bytes | None:
        """The response to a ModelInferRequest; None if the request has to take the usual path."""
        if not is_repeatable(data):
            return None
        found, id_field = self.responses.get(data), b""
        if found is None:
            try:
                data, id_field = _split_id(data)
            except (IndexError, UnicodeDecodeError):
                return None
            found = self.responses.get(data) if id_field else None
            if found is None:
                return None
        if not self._core.repeat_cache_hit(found.model_name, found.model_version, found.hit):
            del self.responses[data]
            return None
        return found.message + id_field if id_field else found.message

    def remember(
        self, data: bytes, request: InferRequest, response: InferResponse, message: bytes
    ) -> None:
        """Keeps a response that came from the cache, and its message, unless they are large.

        `data`: the message of the request, which is repeatable and matches a template of the
        RequestCache, or is usual.
        """
        hit = response.cache_hit
        if not isinstance(hit, CacheHit) or len(message) > _MAX_RESPONSE_BYTES:
            return
        data, id_field = _split_id(data)
        if request.id:
            if not id_field:
                return  # it is a part of `data`, and has to be one of the response
            message = encode_infer_response(msgspec.structs.replace(response, id=""))
        if len(self.responses) >= _MAX_RESPONSES:
            self.responses.clear()
        self.responses[data] = _CachedResponse(
            request.model_name, request.model_version, hit, message
        )


def is_repeatable(data: bytes) -> bool:
    """Whether the message of a request is short, and all of it is in its bytes."""
    return len(data) <= MAX_REPEATABLE_BYTES and not isinstance(data, PlacedMessage)


def _split_id(data: bytes) -> tuple[bytes, bytes]:
    """A request without its id, and the field with the id.

    The field is empty if there is none, or not at its usual place, or it is long. Raises IndexError
    or UnicodeDecodeError.
    """
    start = data[1] + 2  # after the name of the model
    if data[start] == MODEL_VERSION_TAG:
        start += data[start + 1] + 2
    if data[start] != ID_TAG or data[start + 1] > 127:
        return data, b""
    end = start + data[start + 1] + 2
    if end > len(data):
        raise IndexError(end)
    data[start + 2 : end].decode()
    return data[:start] + data[end:], data[start:end]
