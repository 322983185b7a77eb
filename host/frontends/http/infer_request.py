"""Builds an `InferRequest` from a JSON part and binary data; tensors are views of the body.

The rules are in docs/reference/protocol.md, "Inference request" and "Raw binary request".
"""

from __future__ import annotations

from math import prod

from host.config.model_config import ModelConfig
from host.errors import HostError, invalid_argument
from host.frontends.http.inference_header import (
    MAX_CACHED_BYTES,
    InferenceHeader,
    InputHeader,
)
from host.frontends.http.tensors import JsonInputLimit
from host.frontends.inference_core import RegionLookup
from host.inference.request import Buffer, Classification, InferRequest, Tensor
from host.inference.tensor_spec import wire_name
from stub.wire.datatypes import SIZES

_MIN_VIEW_BYTES = 8192  # bytes of a body; below that, copying a slice is cheaper than a memoryview


def to_request(
    head: InferenceHeader,
    model: str,
    version: int,
    body: bytes,
    header_length: int,
    regions: RegionLookup,
) -> InferRequest:
    """Builds a request from a JSON part and a body with binary data from byte `header_length`.

    Raises HostError with the texts of docs/reference/protocol.md, "Inference request" and "Shared
    memory".
    """
    request = InferRequest(
        model,
        [],
        version,
        head.id,
        head.output_names.copy(),
        parameters=head.parameters.copy(),
        correlation_id=head.correlation_id,
        flags=head.flags,
        priority=head.priority,
        timeout_us=head.timeout_us,
        # A larger head does not recur, and may hold the data of all inputs.
        shape=head if header_length <= MAX_CACHED_BYTES else None,
    )
    at, end = header_length, len(body)
    view: Buffer = body if end < _MIN_VIEW_BYTES else memoryview(body)
    for entry in head.inputs:
        if entry.region is not None:
            request.inputs.append(_shared_memory_input(entry, regions))
            continue
        data: Buffer
        if entry.data is not None:
            data = entry.data
        else:
            start = at
            at += entry.binary_size
            if at > end:
                raise invalid_argument(
                    f"unexpected size for input '{entry.name}', expecting {at - end} additional"
                    f" bytes for model '{model}'"
                )
            data = view[start:at]
        request.inputs.append(Tensor(entry.name, entry.datatype, entry.shape.copy(), data))
    if at != end:
        raise invalid_argument(f"unexpected additional input data for model '{model}'")
    if head.places_outputs:
        _place_outputs(head, request, regions)
    return request


def _shared_memory_input(head: InputHeader, regions: RegionLookup) -> Tensor:
    """Returns an input that is in client-registered shared memory."""
    assert head.region is not None
    block = regions.find_block(*head.region)
    return Tensor(head.name, head.datatype, head.shape.copy(), block, block)


def _place_outputs(head: InferenceHeader, request: InferRequest, regions: RegionLookup) -> None:
    if isinstance(head.outputs, HostError):
        # A new error: the cached one would collect the traceback of every request.
        raise HostError(head.outputs.code, head.outputs.message)
    counts: dict[str, int] = {}
    for output in head.outputs:
        if output.classes:
            counts[output.name] = output.classes
        if output.region is not None:
            request.output_placement = request.output_placement or {}
            request.output_placement[output.name] = regions.find_block(*output.region)
    if counts:
        request.classification = Classification(counts)


def raw_request(
    config: ModelConfig, version: int, body: bytes, limit: JsonInputLimit
) -> InferRequest:
    """Builds a request from a body that is the raw data of the only input of the model.

    Raises HostError INVALID_ARG with the texts of docs/reference/protocol.md, "Raw binary request".
    """
    name: str = config.name
    if len(config.input) != 1:
        raise _error_without_id(
            "Raw request must only have 1 input (found 1) to be deduced but got"
            f" {len(config.input)} inputs in '{name}' model configuration"
        )
    entry = config.input[0]
    if len(body) > limit.max_bytes:
        raise limit.raw_too_large(len(body))
    datatype = wire_name(entry.data_type)
    dims = list(entry.dims)
    data = body
    if datatype == "BYTES":
        if -1 in dims or prod(dims) != 1:
            raise _error_without_id(
                f"For BYTE datatype raw input '{entry.name}', the model must have input shape [1]"
            )
        data = len(body).to_bytes(4, "little") + body
    elif -1 in dims:
        if dims.count(-1) > 1:
            raise _error_without_id(
                f"The shape of the raw input '{entry.name}' can not be deduced because there are"
                " more than one variable-sized dimension"
            )
        rest = prod(dim for dim in dims if dim != -1) * SIZES[datatype]
        dims[dims.index(-1)] = len(body) // rest if rest else 0
    shape = [1, *dims] if config.max_batch_size > 0 else dims
    return InferRequest(name, [Tensor(entry.name, datatype, shape, data)], version)


def _error_without_id(text: str) -> HostError:
    """A raw request cannot have an id."""
    return invalid_argument(f"[request id: <id_unknown>] {text}")
