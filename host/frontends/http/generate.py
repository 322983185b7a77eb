"""The generate endpoints: JSON or server-sent events (docs/reference/protocol.md, "Generate and
generate_stream").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, aclosing

from host.errors import HostError, invalid_argument
from host.frontends.http.exchange import HTTP_STATUS, JSON, Header, HttpExchange
from host.frontends.http.generate_schema import to_json, to_request
from host.frontends.http.inference_header import MAX_INLINE_BYTES
from host.frontends.http.json_body import json_too_large
from host.frontends.http.json_text import error_body
from host.frontends.http.routes import Route
from host.frontends.http.steps import run_in_turns
from host.frontends.http.trace_events import receive_started, trace_request, trace_response
from host.frontends.inference_core import InferenceCore
from host.inference.request import InferRequest, InferResponse
from host.models.registry import parse_version

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
        tracing = self._core.request_tracer
        receive_started_ns = receive_started(tracing)
        config = await self._core.config_when_loaded(route.resource, route.version)
        if exchange.headers.get(b"content-encoding", b"identity") not in (b"", b"identity"):
            raise invalid_argument("Unsupported content-encoding, only 'identity' is supported.")
        exchange.content_length()
        body = await exchange.read_body(
            self._max_input_size, lambda size: json_too_large(size, self._max_input_size)
        )
        version = parse_version(route.version)
        arguments = (config, version, body, self._max_input_size)
        if len(body) > MAX_INLINE_BYTES:
            request = await asyncio.to_thread(to_request, *arguments)
        else:
            request = to_request(*arguments)
        return request, trace_request(tracing, exchange, request, receive_started_ns)


async def _encode_response(response: InferResponse) -> tuple[int, bytes]:
    """Returns status and JSON of a response, or of its error if it has no JSON form."""
    error = response.error
    if error is None:
        try:
            return 200, await run_in_turns(to_json(response))
        except HostError as unwritable:
            error = unwritable
    return HTTP_STATUS[error.code], error_body(error.message or error.code.value)
