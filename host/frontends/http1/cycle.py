"""Requests on a connection and their responses: of an ASGI application, or on the fast path."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from host.frontends.http.json_text import error_body
from host.frontends.http1.asgi import FILL_BODY, App, Header, Message
from host.frontends.http1.parser import Body, FastHandler
from host.frontends.inference_core import Cancellable
from host.frontends.receive_memory import MessageFiller

JOIN_UP_TO = 65536
"""Bytes of a response; copying more than that costs more than a second write."""

_log = logging.getLogger("pbhost")

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in http.HTTPStatus
}


class RequestConnection(Protocol):
    """The part of a connection that a cycle uses."""

    transport: asyncio.Transport
    write_small: Callable[[bytes], None]

    async def wait_until_writable(self) -> None:
        """Waits until the client has read enough of the sent data."""

    def resume_reading(self) -> None:
        """Resumes reading from the client."""

    def response_complete(self) -> None:
        """Starts the next request: this response is complete."""

    def fill(self, body: MessageFiller, size: int, done: Callable[[], None]) -> bool:
        """Starts to read the rest of a body to its place; False if that is not possible."""


class RequestResponseCycle:
    """One request and its response. It stores body parts until the application reads them."""

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
        self.response_started = False
        self.response_complete = False
        self.unread_bytes = 0  # bytes of the body that the application has not read
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._expects_continue = expects_continue
        self._body_parts: list[bytes] = []
        self._response_head = b""  # waits for the first part of the body
        self._chunked = False
        self._body_read = False  # the application has read the whole body
        self._receive_event: asyncio.Event | None = None  # exists while the application waits

    # The connection's side

    def feed_body(self, part: bytes) -> None:
        """Adds a received part of the body."""
        self._body_parts.append(part)
        self.unread_bytes += len(part)
        self._notify()

    def feed_eof(self) -> None:
        """Marks the body as complete."""
        self.more_body = False
        self._notify()

    def client_disconnected(self) -> None:
        """Cancels the request after a disconnect of the client."""
        self.disconnected = True
        self._notify()
        if self.task is not None:
            self.task.cancel()

    def _notify(self) -> None:
        if self._receive_event is not None:
            self._receive_event.set()

    async def run(self, app: App) -> None:
        """Runs the application. Closes the connection if the response is then incomplete."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:  # a defect of ours
            _log.error("unexpected failure of an HTTP application", exc_info=error)
        finally:
            self.task = None
            if not (self.response_complete or self.disconnected):
                self._connection.transport.close()

    # The application's side

    async def fill_body(self, body: MessageFiller, size: int) -> bool:
        """As FillBody."""
        if self.unread_bytes or not self.more_body or self.disconnected or self.response_complete:
            return False
        filled = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not filled.done():
                filled.set_result(None)

        if not self._connection.fill(body, size, done):
            return False
        await filled
        self._body_read = True
        return True

    async def receive(self) -> Message:
        """Returns the next part of the body; after the last one, `http.disconnect`."""
        connection = self._connection
        if self._expects_continue and not connection.transport.is_closing():
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        while not (self.disconnected or self.response_complete):
            if not self._body_read and (self._body_parts or not self.more_body):
                parts, self._body_parts, self.unread_bytes = self._body_parts, [], 0
                self._body_read = not self.more_body
                # A single part is not copied.
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                message = {"type": "http.request", "body": body, "more_body": self.more_body}
                return {**message, FILL_BODY: self.fill_body} if self.more_body else message
            connection.resume_reading()
            self._receive_event = asyncio.Event()
            await self._receive_event.wait()
            self._receive_event = None
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Sends a part of the body. The head is sent with the first part."""
        await self._connection.wait_until_writable()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self.response_started = True
            if self._expects_continue and self.more_body and not self._body_parts:
                # The client may or may not send the body, so the next bytes are ambiguous.
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
        self._chunked = self.scope["http_version"] != "1.0"  # such a client reads to the end
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
        """Writes a part of the body, with its head and its chunk framing."""
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


_FAILURE = error_body("unexpected failure")
_INTERNAL_ERROR = (
    STATUS_LINES[500] + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(_FAILURE),
    (_FAILURE,),
)


class FastPathCycle:
    """One complete request and its response."""

    __slots__ = (
        "response_complete",
        "keep_alive",
        "response_started",
        "_connection",
        "_disconnected",
        "_request",
    )

    def __init__(self, connection: RequestConnection) -> None:
        self.keep_alive = True
        self.response_started = False
        self.response_complete = False
        self._connection = connection
        self._disconnected = False
        self._request: Cancellable | None = None

    def start_request(self, handler: FastHandler, body: bytes) -> bool:
        """Calls the handler; False if the request needs a task."""
        try:
            request = handler(body, self._send_response)
        except Exception as error:  # a defect of ours
            _log.error("unexpected failure of an HTTP request", exc_info=error)
            if not self.response_complete:
                self._send_response(*_INTERNAL_ERROR)
            return True
        self._request = request
        return request is not None

    def client_disconnected(self) -> None:
        """Cancels the request after a disconnect of the client."""
        self._disconnected = True
        self.cancel()

    def cancel(self) -> None:
        """Cancels the request if its response is not sent yet."""
        if self._request is not None and not self.response_complete:
            self._request.cancel()

    def _send_response(self, head: bytes, parts: Sequence[Body]) -> None:
        self.response_started = self.response_complete = True
        connection = self._connection
        if self._disconnected:
            return
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        if sum(map(len, parts)) <= JOIN_UP_TO:
            connection.write_small(b"".join((head, end, *parts)))
        else:
            write = connection.transport.write
            write(head + end)
            for part in parts:
                write(part)
        if not self.keep_alive:
            connection.transport.close()
        connection.response_complete()
