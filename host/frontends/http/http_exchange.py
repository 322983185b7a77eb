"""One HTTP request and its response over ASGI: its body, its errors and its trace events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from host.access.api_keys import ApiKeys
from host.access.clients import Client
from host.errors import HostError, invalid_argument, unavailable, unexpected_failure
from host.frontends.error_status import HttpError, error_headers, http_status
from host.frontends.http import json_text as json
from host.frontends.http.json_text import error_body
from host.frontends.http.routes import Endpoint, Route
from host.frontends.http1.asgi import FILL_BODY, RAW_HEADER_NAMES, FillBody, Header, Message
from host.frontends.http1.cycle import JOIN_UP_TO
from host.frontends.receive_memory import (
    MIN_PLACED_BYTES,
    SMALL_BYTES,
    ReceiveBudget,
    ReceiveBuffer,
    ReservedBytes,
    StartFilling,
)
from host.frontends.request_headers import Restrictions
from host.inference.request import Buffer, InferRequest, RequestTracer

JSON = b"application/json"
BINARY = b"application/octet-stream"

MAX_BYTES = 2147483647  # INT32_MAX, as lengths in headers are 32-bit numbers

_UNCOUNTED = nullcontext()


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class HttpExchange:
    """A request and its response. `headers` has lowercase names, and the first of equal names."""

    __slots__ = (
        "client",
        "response_started",
        "headers",
        "method",
        "reserved",
        "response_headers",
        "budget",
        "receive_started_ns",
        "_receive",
        "_scope",
        "_send",
    )

    def __init__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
        budget: ReceiveBudget,
    ) -> None:
        """`budget` limits the memory of the bodies of all requests."""
        self.method: str = scope["method"]
        self.client: Client | None = None  # known by its API key, if keys are needed
        self.response_started = False  # the response head is sent
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.reserved = ReservedBytes(budget)  # the memory of the body
        self.response_headers: tuple[Header, ...] = ()  # further headers of the response
        self.budget = budget
        self.receive_started_ns = 0  # when `read_body` was called
        self._scope = scope
        self._receive = receive
        self._send = send

    def header(self, name: str) -> bytes | None:
        """Returns the value of a header; `name` is in lowercase."""
        return self.headers.get(name.encode("utf-8", "surrogateescape"))

    def query(self) -> str:
        """Returns the part of the URL after `?`, not decoded; empty without one."""
        query: bytes = self._scope["query_string"]
        return query.decode("latin-1")

    def count_request(self) -> AbstractContextManager[None]:
        """Counts an inference request of the client while the context is open.

        Raises TooManyRequests if the client has reached a limit.
        """
        return _UNCOUNTED if self.client is None else self.client.count_request()

    def raw_headers(self) -> Iterable[Header]:
        """Returns all headers; the names have the case that the client sent."""
        names: Sequence[bytes] | None = self._scope.get("extensions", {}).get(RAW_HEADER_NAMES)
        headers: list[Header] = self._scope["headers"]
        if names is None:
            return headers
        return [(name, value) for name, (_, value) in zip(names, headers, strict=True)]

    def content_length(self) -> int | None:
        """Returns the value of `Content-Length`, None without one. Raises HostError INVALID_ARG."""
        return self.length_header("Content-Length")

    def length_header(self, name: str) -> int | None:
        """Returns a length header, a 32-bit number of bytes; None if it is absent.

        Raises HostError INVALID_ARG (docs/reference/http.md, "Inference request").
        """
        value = self.headers.get(name.lower().encode())
        if value is None:
            return None
        text = value.decode("latin-1").strip()
        digits = text[1:] if text[:1] in ("-", "+") else text
        if not (digits.isascii() and digits.isdecimal()):
            raise invalid_argument(f"Unable to parse {name}, got: {text}")
        number = int(text) if len(text) < 20 else MAX_BYTES + 1
        if not -MAX_BYTES - 1 <= number <= MAX_BYTES:
            raise invalid_argument(
                f"Unable to parse {name}, value is out of range [ -2147483648, 2147483647 ],"
                f" got: {text}"
            )
        return number

    async def read_body(
        self,
        max_size: int,
        too_large: Callable[[int], HostError],
        start_filling: StartFilling | None = None,
    ) -> bytes:
        """Reads the whole body. Raises `too_large(size)` if it exceeds `max_size` bytes.

        A large body of declared size is written to what `start_filling` returns, as it arrives.

        A declared size is checked before the body is read, and the actual size on arrival. Raises
        OutOfReceiveMemory if the server has no memory for the body.
        """
        self.receive_started_ns = time.monotonic_ns()
        declared = self.headers.get(b"content-length")
        length = None if declared is None else int(declared)
        if length is not None and length > max_size:
            raise too_large(length)
        if b"transfer-encoding" in self.headers:
            length = None  # the chunks count
        if length is not None and length > SMALL_BYTES:
            self.reserved.check_room(length)
        message = await self._receive()
        first = self._body_part(message)
        if not message.get("more_body") and len(first) <= SMALL_BYTES:
            if len(first) > max_size:
                raise too_large(len(first))
            return first
        body = ReceiveBuffer(self.budget, length, start_filling, MIN_PLACED_BYTES)
        try:
            body.append(first)
            while message.get("more_body") and body.size <= max_size:
                fill: FillBody | None = message.get(FILL_BODY)
                if fill is not None and length is not None and body.filled is not None:
                    left = length - body.size
                    if await fill(body.filled, left):
                        body.advance(left)
                        break
                message = await self._receive()
                body.append(self._body_part(message))
            if body.size > max_size:
                raise too_large(body.size)
            whole = body.finish()
        except BaseException:  # also after a cancellation
            body.discard()
            raise
        self.reserved = body.reserved
        return whole

    def release_body(self) -> ReservedBytes:
        """Returns the memory of the body, which the caller keeps from here on."""
        reserved, self.reserved = self.reserved, ReservedBytes(self.budget)
        return reserved

    @staticmethod
    def _body_part(message: Message) -> bytes:
        if message["type"] != "http.request":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        return part

    async def send_response(
        self,
        kind: bytes,
        parts: Sequence[Buffer],
        headers: Iterable[Header] = (),
        status: int = 200,
    ) -> None:
        """Sends a response whose body has several parts; large parts are not copied."""
        size = 0
        for part in parts:
            size += len(part) if type(part) is bytes else memoryview(part).nbytes
        await self._send_head(status, kind, [(b"content-length", b"%d" % size), *headers])
        if size <= JOIN_UP_TO:
            await self._send({"type": "http.response.body", "body": b"".join(parts)})
            return
        last = len(parts) - 1
        for index, part in enumerate(parts):
            data = part if type(part) is bytes else memoryview(part).cast("B")
            await self._send(
                {"type": "http.response.body", "body": data, "more_body": index < last}
            )

    async def start_response(
        self, kind: bytes, headers: Iterable[Header] = (), status: int = 200
    ) -> None:
        """Starts a response whose body is sent in chunks."""
        await self._send_head(status, kind, list(headers))

    async def send_chunk(self, data: bytes, more: bool = True) -> None:
        """Sends the next chunk. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_head(self, status: int, kind: bytes, headers: list[Header]) -> None:
        self.response_started = True
        headers.insert(0, (b"content-type", kind))
        headers.extend(self.response_headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_empty(self) -> None:
        """Sends status 200 with an empty body."""
        await self.send_response(JSON, ())

    async def send_json(self, body: bytes) -> None:
        """Sends a JSON response."""
        await self.send_response(JSON, (body,))

    async def send_error(self, error: HostError) -> None:
        """Sends an error response."""
        body = error_body(error.message or error.code.value)
        await self.send_response(JSON, (body,), error_headers(error), http_status(error))


async def read_json_body(exchange: HttpExchange, max_size: int) -> bytes:
    """Returns the body of a request. Raises HostError if it has more than `max_size` bytes."""
    return await exchange.read_body(max_size, lambda size: json_too_large(size, max_size))


async def read_json_object(exchange: HttpExchange, max_size: int) -> dict[str, Any]:
    """Returns the body as a JSON object; an empty body, or other JSON, is an empty object.

    Raises HostError if it is not JSON, or has more than `max_size` bytes.
    """
    body = await read_json_body(exchange, max_size)
    document = json.parse(body) if body else {}
    return document if isinstance(document, dict) else {}


def json_too_large(size: int, most: int) -> HostError:
    """Returns the error for a JSON part of more than `most` bytes."""
    return invalid_argument(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {most}"
        " bytes. Use --http-max-input-size to increase the limit."
    )


_log = logging.getLogger("pbhost")

Handler = Callable[[HttpExchange, Route], Awaitable[None]]


SendError = Callable[[HttpExchange, HostError], Awaitable[None]]


async def answer_exchange(
    exchange: HttpExchange,
    answering: Awaitable[None],
    send_error: SendError = HttpExchange.send_error,
    api: str = "HTTP",
) -> None:
    """Awaits the answer to a request of an API; sends an error response if that fails."""
    try:
        await answering
    except HostError as error:
        await send_error(exchange, error)
    except ClientDisconnected:
        pass
    except asyncio.CancelledError:
        # The client has disconnected, or the exit timeout of the server has passed.
        if not exchange.response_started:
            await send_error(exchange, unavailable("Server exiting"))
    except Exception as error:  # a defect of ours
        _log.error("unexpected failure of an %s request", api, exc_info=error)
        if not exchange.response_started:
            await send_error(exchange, unexpected_failure(error))


def check_restriction(
    exchange: HttpExchange, endpoint: Endpoint, restrictions: Restrictions
) -> None:
    """Raises HttpError if the endpoint is restricted, and the client lacks the header for it."""
    lacking = restrictions.missing_header(endpoint.category, exchange.header)
    if lacking is not None:
        raise HttpError(f"This API is restricted, expecting header '{lacking}'", 403)


def authorize(exchange: HttpExchange, route: Route, keys: ApiKeys) -> None:
    """Finds the client of a request. Raises HostError if it may not send the request."""
    client = keys.authorize(route.endpoint.category, exchange.headers.get(b"authorization"))
    if route.endpoint.about_models:
        client.check_model(route.resource)
    exchange.client = client


def check_method(exchange: HttpExchange, methods: Iterable[str]) -> None:
    """Raises HttpError for a request with another method."""
    if exchange.method not in methods:
        raise HttpError("Method Not Allowed", 405, ((b"allow", ", ".join(methods).encode()),))


@contextmanager
def trace_request(
    tracing: RequestTracer | None, exchange: HttpExchange, request: InferRequest
) -> Iterator[None]:
    """Traces a request, whose body is complete, until its response is sent."""
    if tracing is None:
        yield
        return

    def header(name: str) -> str | None:
        value = exchange.header(name)
        return None if value is None else value.decode("latin-1")

    trace = request.trace = tracing.start_trace(request.model_name, header)
    if trace is None:
        yield
        return
    trace.record_event("HTTP_RECV_START", exchange.receive_started_ns)
    trace.record_event("HTTP_RECV_END")
    try:
        yield
    finally:
        trace.finish_response()


@contextmanager
def trace_response(request: InferRequest) -> Iterator[None]:
    """Records the start and the end of sending a response."""
    trace = request.trace
    if trace is not None:
        trace.record_event("HTTP_SEND_START")
    yield
    if trace is not None:
        trace.record_event("HTTP_SEND_END")
