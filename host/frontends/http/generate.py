"""The generate endpoints: one JSON object, or a stream of server-sent events (spec 1.10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, aclosing

from host.core import Core
from host.errors import HostError, invalid_argument
from host.frontends.http.exchange import JSON, STATUS, Exchange, Header
from host.frontends.http.generate_schema import to_json, to_request
from host.frontends.http.infer import json_too_large
from host.frontends.http.json_text import error_body
from host.frontends.http.routes import Route
from host.frontends.http.traced import begun, sending, traced
from host.inference.request import InferRequest, InferResponse
from host.models.registry import parse_version

_EVENTS = b"text/event-stream; charset=utf-8"
_NOT_ONE = error_body(
    "generate expects model to produce exactly 1 response, use generate stream for model that"
    " generates various number of responses"
)

LoadReport = Callable[[Exchange], Iterable[Header]]
"""Makes the headers that tell a load balancer how busy the model is, if the client asks."""


class Generation:
    """Answers requests of flat JSON. `most` is `--http-max-input-size`."""

    def __init__(self, core: Core, most: int, load_report: LoadReport) -> None:
        self._core = core
        self._most = most
        self._load_report = load_report

    async def generate(self, exchange: Exchange, route: Route) -> None:
        """Answer with the only response as one JSON object. Raises HostError before it begins."""
        request, trace = await self._request(exchange, route)
        with trace:
            status, body = 200, b""
            async with aclosing(aiter(self._core.infer(request))) as responses:
                async for response in responses:
                    if body:
                        body = _NOT_ONE
                        break  # nobody wants the others: this cancels the request
                    status, body = _encoded(response)
            with sending(request):
                await exchange.begin(JSON, self._load_report(exchange), status)
                await exchange.chunk(body or _NOT_ONE, more=False)

    async def generate_stream(self, exchange: Exchange, route: Route) -> None:
        """Answer with an event for each response, when it comes. Raises HostError before it begins.

        The next response is taken when the client has room for it.
        """
        request, trace = await self._request(exchange, route)
        with trace:
            async with aclosing(aiter(self._core.infer(request))) as responses:
                async for response in responses:
                    with sending(request):
                        await self._send_event(exchange, response)
            with sending(request):
                if not exchange.begun:
                    await exchange.begin(_EVENTS, self._load_report(exchange))
                await exchange.chunk(b"", more=False)

    async def _send_event(self, exchange: Exchange, response: InferResponse) -> None:
        status, body = _encoded(response)
        if not exchange.begun:
            await exchange.begin(_EVENTS, self._load_report(exchange), status)
        await exchange.chunk(b"data: %b\n\n" % body)

    async def _request(
        self, exchange: Exchange, route: Route
    ) -> tuple[InferRequest, AbstractContextManager[None]]:
        """What is asked, and what to work on it within."""
        tracing = self._core.tracing
        begun_ns = begun(tracing)
        config = self._core.model_config(route.subject, route.version)
        if exchange.headers.get(b"content-encoding", b"identity") not in (b"", b"identity"):
            raise invalid_argument("Unsupported content-encoding, only 'identity' is supported.")
        exchange.declared_length()
        body = await exchange.body(self._most, lambda size: json_too_large(size, self._most))
        version = parse_version(route.version)
        request = to_request(config, version, body, self._most)
        return request, traced(tracing, exchange, request, begun_ns)


def _encoded(response: InferResponse) -> tuple[int, bytes]:
    """Status and JSON of a response; of an error, or of what cannot be written as JSON, that."""
    error = response.error
    if error is None:
        try:
            return 200, to_json(response)
        except HostError as unwritable:
            error = unwritable
    return STATUS[error.code], error_body(error.message or error.code.value)
