"""Converts the flat JSON of the generate endpoints (docs/reference/protocol.md, "Generate and
generate_stream").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from host.config.model_config import ModelConfig
from host.errors import HostError, internal, invalid_argument
from host.frontends.http import json_text as json
from host.frontends.http.inference_header import custom_parameter
from host.frontends.http.steps import Steps
from host.frontends.http.tensors import (
    MAX_BYTES,
    JsonInputLimit,
    binary_only_error,
    flatten,
    read_numbers,
    read_strings,
    write_tensor,
)
from host.inference.request import InferRequest, InferResponse, Tensor
from host.inference.tensor_spec import wire_name

_NESTED_KEY = "parameters"
_NO_LIMIT = JsonInputLimit(MAX_BYTES)  # all inputs have one together


def to_request(config: ModelConfig, version: int, text: bytes, max_input_size: int) -> InferRequest:
    """Converts a flat JSON object to a request with at most `max_input_size` bytes of inputs.

    Raises HostError with the texts of docs/reference/protocol.md, "Generate and generate_stream".
    """
    pairs = json.members(json.parse(text))
    request = InferRequest(config.name, [], version)
    for key, value in pairs:
        if key == "id":
            try:
                request.id = json.as_text(value)
            except HostError as error:
                raise json.with_context("Unable to parse 'id'", error) from None
            break
    builder = _RequestBuilder(config, request, max_input_size)
    for key, value in pairs:
        if key != _NESTED_KEY:
            builder.add_member(key, value)
            continue
        if _NESTED_KEY in builder.inputs:
            raise invalid_argument(
                f"Keyword '{_NESTED_KEY}' for nested schema also given as input tensor name"
            )
        if not isinstance(value, dict):
            raise internal(
                f"Expected JSON object for keyword: '{_NESTED_KEY}': attempt to access JSON"
                " non-object as object"
            )
        for inner, inner_value in json.members(value):
            try:
                builder.add_member(inner, inner_value)
            except HostError as error:
                raise json.with_context(f"Converting keyword: '{_NESTED_KEY}'", error) from None
    return request


class _RequestBuilder:
    """Adds JSON members to a request: as inputs if the model has them, otherwise as parameters."""

    def __init__(self, config: ModelConfig, request: InferRequest, max_input_size: int) -> None:
        self.inputs = {entry.name: entry for entry in config.input}
        self._request = request
        self._max_input_size = max_input_size
        self._input_size = 0
        self._batch_dims = [-1] if config.max_batch_size > 0 else []

    def add_member(self, key: str, value: Any) -> None:
        request = self._request
        entry = self.inputs.get(key)
        if entry is None:
            request.parameters.setdefault(json.as_text(key), custom_parameter(key, value))
            return
        if any(tensor.name == key for tensor in request.inputs):
            raise invalid_argument(
                f"[request id: {request.id or '<id_unknown>'}] input '{key}' already exists in"
                " request"
            )
        datatype = wire_name(entry.data_type)
        data, count = _encode_input(key, datatype, value)
        if self._input_size + len(data) > self._max_input_size:
            raise invalid_argument(
                f"request size of {self._input_size} bytes with input '{key}' of size {len(data)}"
                f" bytes exceeds the maximum allowed input size of {self._max_input_size}. Use"
                " --http-max-input-size to increase the limit."
            )
        self._input_size += len(data)
        # An empty input has a shape only if the model has a variable dimension.
        placed = data or -1 in entry.dims
        shape = _deduce_shape(key, count, [*self._batch_dims, *entry.dims]) if placed else []
        request.inputs.append(Tensor(key, datatype, shape, data))


def _encode_input(name: str, datatype: str, value: Any) -> tuple[bytes, int]:
    """Returns the bytes of a scalar or an array, and the length of the outermost array."""
    refusal = binary_only_error(name, datatype)
    if refusal is not None:
        raise refusal
    values = value if isinstance(value, list) else [value]
    if datatype == "BYTES":
        return read_strings(name, flatten(values), _NO_LIMIT), len(values)
    try:
        flat = flatten(values)
        if len(flat) != len(values):
            raise internal("Shape does not match true shape of 'data' field")
        return read_numbers(datatype, flat), len(values)
    except HostError as error:
        raise json.with_context("Unable to parse 'data'", error) from None


def _deduce_shape(name: str, count: int, dims: Sequence[int]) -> list[int]:
    """Returns a shape of `count` elements; the innermost variable dimension takes the rest."""
    wrong = invalid_argument(
        f"The schema can not convert input '{name}' to tensor with proper shape"
    )
    left = count
    for dim in dims:
        if dim != -1:
            if dim == 0 or left % dim:
                raise wrong
            left //= dim
    shape = [1 if dim == -1 else dim for dim in dims]
    for index in range(len(dims) - 1, -1, -1):
        if dims[index] == -1:
            shape[index], left = left, 1
            break
    if left != 1:
        raise wrong
    return shape


def to_json(response: InferResponse) -> Steps[bytes]:
    """Writes a successful response as a flat object with sorted names. Raises HostError."""
    fields: dict[str, bytes] = {}
    if response.id:
        fields["id"] = json.dump(response.id)
    fields["model_name"] = json.dump(response.model_name)
    fields["model_version"] = json.dump(str(response.model_version))
    for name, value in response.parameters.items():
        fields.setdefault(name, json.dump(value))
    for tensor in response.outputs:
        if tensor.name not in fields:
            fields[tensor.name] = yield from _format_output(tensor)
    members = (json.dump(name) + b":" + fields[name] for name in sorted(fields))
    return b"{" + b",".join(members) + b"}"


def _format_output(tensor: Tensor) -> Steps[bytes]:
    """Writes a tensor of one element as a scalar, and any other tensor as a flat array."""
    array = yield from write_tensor(tensor)
    single = all(dim == 1 for dim in tensor.shape)
    return array[1:-1] if single else array
