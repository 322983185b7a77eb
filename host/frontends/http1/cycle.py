"""One HTTP request and its response on a connection, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
"""An ASGI 3 application."""

Header = tuple[bytes, bytes]

RAW_HEADER_NAMES = "pbhost.header_names"
"""Extension of the ASGI scope: names of headers as received; `headers` has them in lowercase."""

JOIN_UP_TO = 65536
"""Bytes of a response; copying more than that costs more than a second write."""

_log = logging.getLogger("pbhost")

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in http.HTTPStatus
}


class RequestConnection(Protocol):
    """What a request needs of the connection that it came by."""

    transport: asyncio.Transport
    write_small: Callable[[bytes], None]

    async def wait_until_writable(self) -> None:
        """Return once the client has taken enough of what it was sent."""

    def resume_reading(self) -> None:
        """Let more of the request come."""

    def response_complete(self) -> None:
        """The response is complete."""


class RequestResponseCycle:
    """The body is kept as the pieces that came, until the application takes them."""

    __slots__ = (
        "response_complete",
        "disconnected",
        "keep_alive",
        "more_body",
        "scope",
        "response_started",
        "task",
        "unread_bytes",
        "_chunked",
        "_connection",
        "_expects_continue",
        "_response_head",
        "_receive_event",
        "_body_parts",
        "_body_read",
    )

    def __init__(
        self,
        connection: RequestConnection,
        scope: Message,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.disconnected = False
        self.more_body = True
        self.response_started = False  # the response
        self.response_complete = False  # the response
        self.unread_bytes = 0  # bytes of the body that the application has not taken
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._expects_continue = expects_continue
        self._body_parts: list[bytes] = []
        self._response_head = b""  # until the first part of the body is there
        self._chunked = False
        self._body_read = False  # the application has had the whole body
        self._receive_event: asyncio.Event | None = None  # exists while the application waits

    # The connection's side

    def feed_body(self, part: bytes) -> None:
        """A part of the body has come."""
        self._body_parts.append(part)
        self.unread_bytes += len(part)
        self._notify()

    def feed_eof(self) -> None:
        """The body is complete."""
        self.more_body = False
        self._notify()

    def client_disconnected(self) -> None:
        """The client has gone: whoever answers it may stop."""
        self.disconnected = True
        self._notify()
        if self.task is not None:
            self.task.cancel()

    def _notify(self) -> None:
        if self._receive_event is not None:
            self._receive_event.set()

    async def run(self, app: App) -> None:
        """Have the request answered. A response that is not complete then ends the connection."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:  # a defect: logged, and half an answer ends the connection
            _log.error("unexpected failure of an HTTP application", exc_info=error)
        finally:
            self.task = None
            if not (self.response_complete or self.disconnected):
                self._connection.transport.close()

    # The application's side

    async def receive(self) -> Message:
        """The next part of the body; after the last, that the client has gone."""
        connection = self._connection
        if self._expects_continue and not connection.transport.is_closing():
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        while not (self.disconnected or self.response_complete):
            if not self._body_read and (self._body_parts or not self.more_body):
                parts, self._body_parts, self.unread_bytes = self._body_parts, [], 0
                self._body_read = not self.more_body
                # A single piece is passed on as it is.
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                return {"type": "http.request", "body": body, "more_body": self.more_body}
            connection.resume_reading()
            self._receive_event = asyncio.Event()
            await self._receive_event.wait()
            self._receive_event = None
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the head, which waits for the first part of the body, or a part of the body."""
        await self._connection.wait_until_writable()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self.response_started = True
            if self._expects_continue and self.more_body and not self._body_parts:
                # It may send its body or not: what comes next could be either.
                self.keep_alive = False
            self._expects_continue = False
            self._build_response_head(message["status"], message["headers"])
            return
        more: bool = message.get("more_body", False)
        self._write_body(message.get("body", b""), more)
        if not more:
            self.response_complete = True
            self._notify()
            if not self.keep_alive:
                self._connection.transport.close()
            self._connection.response_complete()

    def _build_response_head(self, status: int, headers: Iterable[Header]) -> None:
        lines = [STATUS_LINES[status]]
        self._chunked = True
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
            if name == b"content-length":
                self._chunked = False
        if self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._response_head = b"".join(lines)

    def _write_body(self, body: bytes | memoryview, more: bool) -> None:
        """Write a part of the body, together with what belongs before and after it."""
        write = self._connection.transport.write
        head, self._response_head = self._response_head, b""
        if self.scope["method"] == "HEAD":
            write(head)
        elif self._chunked:
            size = b"%x\r\n" % len(body) if body else b""
            end = b"" if more else b"0\r\n\r\n"
            write(b"".join((head, size, body, b"\r\n" if body else b"", end)))
        elif len(body) <= JOIN_UP_TO:
            write(b"".join((head, body)))
        else:
            if head:
                write(head)
            write(body)
