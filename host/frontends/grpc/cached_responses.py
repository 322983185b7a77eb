"""Answers requests that the response cache has answered before, without parsing them.

All bytes of such a ModelInferRequest but its id are equal. The response cache still decides about
each of them: it counts a hit, or the request takes the usual path because the entry has been
evicted.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec

from host.cache.responses import CacheHit
from host.errors import HostError
from host.frontends.grpc.infer_request import (
    ID_TAG,
    MODEL_VERSION_TAG,
    InferMessage,
    parse_infer_request,
    read_model_name,
)
from host.frontends.grpc.infer_response import encode_infer_response
from host.frontends.grpc.protobuf_wire import PlacedMessage
from host.frontends.inference_core import InferenceCore
from host.inference.request import InferRequest, InferResponse

MAX_REPEATABLE_BYTES = 1024
"""Bytes of a request whose response is kept."""

_PROBE_ID = "q"
_PROBE = bytes([ID_TAG, 1]) + _PROBE_ID.encode()
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
                before, id_field, after = _split_id(data)
            except (IndexError, UnicodeDecodeError):
                return None
            data = before + after
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

        `data`: the message of the request. It is recognised by its bytes, so nothing of it may be
        in shared memory.
        """
        hit = response.cache_hit
        if (
            not isinstance(hit, CacheHit)
            or len(message) > _MAX_RESPONSE_BYTES
            or not is_repeatable(data)
            or request.output_placement is not None
            or any(tensor.owner is not None for tensor in request.inputs)
            or read_model_name(data) != request.model_name
        ):
            return
        try:
            before, id_field, after = _split_id(data)
            is_usual = _split_id(before + after) == (before, b"", after)
            rest = parse_infer_request(before + after)
            probe = parse_infer_request(before + _PROBE + after)
        except (IndexError, UnicodeDecodeError, HostError):
            return
        if rest.id or probe != dataclasses.replace(rest, id=_PROBE_ID) or not is_usual:
            return  # other ids at that place would change something else, or not the response
        if not _has_tensors(rest):
            return
        if id_field:
            message = encode_infer_response(msgspec.structs.replace(response, id=""))
        if len(self.responses) >= _MAX_RESPONSES:
            self.responses.clear()
        self.responses[before + after] = _CachedResponse(
            request.model_name, request.model_version, hit, message
        )


def is_repeatable(data: bytes) -> bool:
    """Whether the message of a request is short, and all of it is in its bytes."""
    return len(data) <= MAX_REPEATABLE_BYTES and not isinstance(data, PlacedMessage)


def _has_tensors(message: InferMessage) -> bool:
    """Whether the tensors of a request are in its message."""
    return all(full is None or full.HasField("contents") for *_, full in message.inputs)


def _split_id(data: bytes) -> tuple[bytes, bytes, bytes]:
    """The bytes before the field with the id of a request, this field, and the bytes after it.

    The field is empty if there is none, or not at its usual place, or it is long. Raises IndexError
    or UnicodeDecodeError.
    """
    start = data[1] + 2  # after the name of the model
    if start < len(data) and data[start] == MODEL_VERSION_TAG:
        start += data[start + 1] + 2
    if start == len(data) or data[start] != ID_TAG or data[start + 1] > 127:
        return data[:start], b"", data[start:]
    end = start + data[start + 1] + 2
    if end > len(data):
        raise IndexError(end)
    data[start + 2 : end].decode()
    return data[:start], data[start:end], data[end:]
