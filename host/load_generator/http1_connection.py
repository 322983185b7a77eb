"""A client's HTTP/1.1 connection: sends prepared requests, one after the other."""

from __future__ import annotations

import asyncio
import http
import json
from typing import Any, cast

import httptools

from host.load_generator.http2_connection import CONNECTION_LOST, Receiver

_MAX_ERROR_BYTES = 65536


class Http1Connection(asyncio.Protocol):
    """Carries one request at a time. With `reads_events`, responses are server-sent events."""

    def __init__(self, reads_events: bool) -> None:
        self._reads_events = reads_events
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._failed = False
        self._body = b""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is open."""

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None

    def send_request(self, request: bytes, receiver: Receiver) -> None:
        """Sends a request; the response to the last one must be complete."""
        assert self._transport is not None
        self._receiver = receiver
        self._transport.write(request)

    def close(self) -> None:
        """Closes the connection; the receiver is not told."""
        self._receiver = None
        transport, self._transport = self._transport, None  # `connection_lost` is called later
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepts requests from now on."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such class
        self.ready.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the request."""
        self._transport = None
        self._end(CONNECTION_LOST, str(exc or "closed by the server"))

    def data_received(self, data: bytes) -> None:
        """Reads a response."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            receiver = self._receiver
            self.close()
            if receiver is not None:
                receiver.on_end("no HTTP", f"the answer is not one of HTTP/1.1: {error}")

    def on_headers_complete(self) -> None:
        """The status is known."""
        self._failed = self._parser.get_status_code() != 200

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        if self._failed:
            self._body += body[: _MAX_ERROR_BYTES - len(self._body)]
        elif self._reads_events:
            self._read_events(body)

    def _read_events(self, body: bytes) -> None:
        if self._body:
            body = self._body + body
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        *events, self._body = body.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and self._receiver is not None:
                self._receiver.on_message(event[5:].lstrip())

    def on_message_complete(self) -> None:
        """The response is complete."""
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
            self._transport = None
        body, self._body = self._body, b""
        if self._failed:
            self._end(_status_name(status), _error_text(body))
        else:
            self._end("", "")

    def _end(self, status: str, message: str) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.on_end(status, message)


def _status_name(status: int) -> str:
    try:
        return f"HTTP {status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"


def _error_text(body: bytes) -> str:
    """The error of a server: Triton's form, or that of OpenAI's API, or the body."""
    try:
        found = json.loads(body)["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
