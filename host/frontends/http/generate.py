"""The generate endpoints: JSON or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any

from host.config.schema import ModelConfig
from host.errors import HostError, internal, invalid_argument
from host.frontends.error_status import HTTP_STATUS
from host.frontends.http import json_text as json
from host.frontends.http.http_exchange import (
    JSON,
    HttpExchange,
    read_json_body,
    trace_request,
    trace_response,
)
from host.frontends.http.inference_header import MAX_INLINE_BYTES, custom_parameter
from host.frontends.http.json_text import error_body
from host.frontends.http.routes import Route
from host.frontends.http.tensors import (
    MAX_BYTES,
    Steps,
    binary_only_error,
    flatten,
    read_numbers,
    read_strings,
    run_in_turns,
    write_tensor,
)
from host.frontends.http1.asgi import Header
from host.frontends.inference_core import InferenceCore
from host.inference.request import InferRequest, InferResponse, Tensor
from host.inference.tensor_spec import wire_name
from host.models.registry import parse_version

_NESTED_KEY = "parameters"


def to_request(config: ModelConfig, version: int, text: bytes, max_input_size: int) -> InferRequest:
    """Converts a flat JSON object to a request with at most `max_input_size` bytes of inputs.

    Raises HostError with the texts of docs/reference/http.md, "Generate and generate_stream".
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
        # All inputs have a limit together.
        return read_strings(name, flatten(values), MAX_BYTES), len(values)
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


_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_NOT_ONE_RESPONSE = error_body(
    "generate expects model to produce exactly 1 response, use generate stream for model that"
    " generates various number of responses"
)

LoadReport = Callable[[HttpExchange], Iterable[Header]]
"""Returns the headers that report the load of the model, if the client asks for them."""


class GenerateHandler:
    """Answers requests in flat JSON. `max_input_size` is `--http-max-input-size`."""

    def __init__(self, core: InferenceCore, max_input_size: int, load_report: LoadReport) -> None:
        self._core = core
        self._max_input_size = max_input_size
        self._load_report = load_report

    async def generate(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with one response as a JSON object. Raises HostError before that."""
        request, trace = await self._start_request(exchange, route)
        with trace:
            status, body = 200, b""
            async with aclosing(aiter(await self._core.infer_when_loaded(request))) as responses:
                async for response in responses:
                    if body:
                        body = _NOT_ONE_RESPONSE
                        break  # this cancels the request
                    status, body = await _encode_response(response)
            with trace_response(request):
                await exchange.start_response(JSON, self._load_report(exchange), status)
                await exchange.send_chunk(body or _NOT_ONE_RESPONSE, more=False)

    async def generate_stream(self, exchange: HttpExchange, route: Route) -> None:
        """Sends an event for each response. Raises HostError before the first event.

        Waits for the client to read before it takes the next response.
        """
        request, trace = await self._start_request(exchange, route)
        with trace:
            async with aclosing(aiter(await self._core.infer_when_loaded(request))) as responses:
                async for response in responses:
                    with trace_response(request):
                        await self._send_event(exchange, response)
            if not exchange.response_started:
                with trace_response(request):
                    await exchange.start_response(_EVENT_STREAM, self._load_report(exchange))
            await exchange.send_chunk(b"", more=False)

    async def _send_event(self, exchange: HttpExchange, response: InferResponse) -> None:
        status, body = await _encode_response(response)
        if not exchange.response_started:
            await exchange.start_response(_EVENT_STREAM, self._load_report(exchange), status)
        await exchange.send_chunk(b"data: %b\n\n" % body)

    async def _start_request(
        self, exchange: HttpExchange, route: Route
    ) -> tuple[InferRequest, AbstractContextManager[None]]:
        """Returns the request, and the context manager that traces it."""
        config = await self._core.config_when_loaded(route.resource, route.version)
        if exchange.headers.get(b"content-encoding", b"identity") not in (b"", b"identity"):
            raise invalid_argument("Unsupported content-encoding, only 'identity' is supported.")
        exchange.content_length()
        body = await read_json_body(exchange, self._max_input_size)
        version = parse_version(route.version)
        arguments = (config, version, body, self._max_input_size)
        if len(body) > MAX_INLINE_BYTES:
            request = await asyncio.to_thread(to_request, *arguments)
        else:
            request = to_request(*arguments)
        return request, trace_request(self._core.request_tracer, exchange, request)


async def _encode_response(response: InferResponse) -> tuple[int, bytes]:
    """Returns status and JSON of a response, or of its error if it has no JSON form."""
    error = response.error
    if error is None:
        try:
            return 200, await run_in_turns(to_json(response))
        except HostError as unwritable:
            error = unwritable
    return HTTP_STATUS[error.code], error_body(error.message or error.code.value)
