"""One HTTP/1.1 connection: uvicorn's, with limits, patience, and an end for who has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

RECEIVED_NAMES = "pbhost.header_names"
"""Extension of the ASGI scope: names of headers as received; `headers` has them in lowercase."""

MOST_CHUNKS = 65536
_TOO_MANY_CHUNKS = (
    f"Chunked request body exceeds maximum of {MOST_CHUNKS} non-empty chunks."
    " Send fewer or larger HTTP chunks."
)
_LARGE_HEADERS = "Request headers are too large"
_HIGH_WATER = 1 << 20  # bytes of a body that wait for the application

_log = logging.getLogger("pbhost")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection may take for what, in seconds, and how large headers may be.

    `headers`: until a request's headers are there, from its first byte or from the connection's
    beginning. `pause`: a body must bring `pace` bytes in that time, and a client must have taken
    something of a response. `idle`: between two requests.
    """

    headers: float = 60.0
    pause: float = 60.0
    pace: int = 16384
    idle: float = 600.0
    header_bytes: int = 65536


class Connection(HttpToolsProtocol):
    """A client's connection. The task that answers a request is cancelled when its client goes."""

    def __init__(self, *arguments: Any, patience: Patience, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _log  # uvicorn's own may be that of a program which the host is part of
        self.access_log = False
        self._patience = patience
        self._running: tuple[_Cycle, asyncio.Task[None]] | None = None
        self._begun = False  # a request, which is not complete yet
        self._in_headers = False
        self._upgrading = False
        self._header_bytes = 0
        self._chunks = 0
        self._received = 0  # bytes since the last look
        self._unsent = 0  # bytes that waited to be sent at the last look
        self._names: list[bytes] = []
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_if_idle(self._patience.headers)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_reading_timer()
        if self._writing is not None:
            self._writing.cancel()
        self.pipeline.clear()
        if self._running is not None:
            cycle, task = self._running
            cycle.disconnected = True
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._in_headers:
            self._header_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            _log.error("unexpected failure of an HTTP connection", exc_info=error)
            self.transport.abort()
        except httptools.HttpParserError as error:
            self._refuse(400, f"malformed HTTP request: {error}")
        if self._begun:
            if self._in_headers and self._header_bytes > self._patience.header_bytes:
                self._refuse(431, _LARGE_HEADERS)
            elif self._reading is None:
                limit = self._patience.headers if self._in_headers else self._patience.pause
                self._reading = self.loop.call_later(limit, self._look_at_reading)
        elif self._reading is not None:
            self._stop_reading_timer()

    def _feed(self, data: bytes) -> None:
        if self.transport.is_closing():  # what comes after a refusal
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Clients may propose HTTP/2. We go on with 1.1; the parser takes that for the end of
            # HTTP, so another one takes over, with what it has to know of the body.
            framing = _framing(self.headers)
            self.parser = httptools.HttpRequestParser(self)
            if framing:
                self._upgrading = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
                self._upgrading = False
            self._feed(data[upgrade.args[0] :])

    def _look_at_reading(self) -> None:
        """The time for a request's headers is over, or it is time to see how its body comes."""
        self._reading = None
        if self._in_headers or not (self.flow.read_paused or self._received >= self._patience.pace):
            self._refuse(408, "The request did not arrive in time")
            return
        self._received = 0
        self._reading = self.loop.call_later(self._patience.pause, self._look_at_reading)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._unsent = -1
            self._look_at_writing()

    def _look_at_writing(self) -> None:
        """Give up a client that has taken nothing since the last look."""
        self._writing = None
        if not self.flow.write_paused or self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent == self._unsent:
            self.transport.abort()
            return
        self._unsent = unsent
        self._writing = self.loop.call_later(self._patience.pause, self._look_at_writing)

    # The parser

    def on_message_begin(self) -> None:
        if self._upgrading:
            return
        self._unset_keepalive_if_required()
        self._begun = self._in_headers = True
        self._header_bytes = self._received = self._chunks = 0
        self._stop_reading_timer()
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._names = []

    def on_url(self, url: bytes) -> None:
        if not self._upgrading:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._upgrading:
            return
        lower = name.lower()
        if lower == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((lower, value))
        self._names.append(name)

    def on_headers_complete(self) -> None:
        if self._upgrading or self.transport.is_closing():
            return
        size = len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value)
        if size > self._patience.header_bytes:
            self._refuse(431, _LARGE_HEADERS)
            return
        self._in_headers = False
        self._stop_reading_timer()  # it was for the headers
        path, query = _split(self.url)
        version = self.parser.get_http_version()
        cycle = _Cycle(
            scope={
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": version,
                "method": self.parser.get_method().decode("ascii"),
                "scheme": self.scheme,
                "path": path.decode("latin-1"),
                "raw_path": path,
                "query_string": query,
                "root_path": "",
                "headers": self.headers,
                "server": self.server,
                "client": self.client,
                "extensions": {RECEIVED_NAMES: self._names},
            },
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        before, self.cycle = self.cycle, cycle
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:  # a pipelined request waits for its turn
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        # The last, empty chunk is counted as well, but brings no body.
        if self._chunks > MOST_CHUNKS:
            self._refuse(400, _TOO_MANY_CHUNKS)
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        assert isinstance(cycle, _Cycle)
        cycle.parts.append(body)
        cycle.waiting += len(body)
        if cycle.waiting > _HIGH_WATER:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        if self.parser.should_upgrade() and _framing(self.headers):
            return  # its body is still to come, see `_feed`
        self._begun = False
        if not self.pipeline:
            self.flow.resume_reading()  # only who reads notices that a client goes
        self.cycle.more_body = False
        self.cycle.message_event.set()
        if self.cycle.response_complete:
            self._close_if_idle(self._patience.idle)

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        assert isinstance(cycle, _Cycle)
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._running = cycle, task

    def on_response_complete(self) -> None:
        self._running = None
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self._running is None and not self._begun:
            self._close_if_idle(self._patience.idle)

    def _close_if_idle(self, seconds: float) -> None:
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                seconds, self.timeout_keep_alive_handler
            )

    def _refuse(self, status: int, text: str) -> None:
        """Answer with an error, if the response has not begun, and close the connection."""
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self._running[0] if self._running else None
        if cycle is None or not cycle.response_started:
            body = json.dumps({"error": text}, separators=(",", ":")).encode()
            self.transport.write(
                STATUS_LINE[status] + b"content-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()


class _Cycle(RequestResponseCycle):
    """One request and its response. The body is kept as the pieces that came."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.parts: list[bytes] = []
        self.waiting = 0  # bytes in `parts`
        self._read = False  # the application has had the whole body

    async def run_asgi(self, app: Any) -> None:
        """Have the request answered. A response that is not complete then ends the connection."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:
            _log.error("unexpected failure of an HTTP application", exc_info=error)
        finally:
            self.on_response = lambda: None
            if not (self.response_complete or self.disconnected):
                self.transport.close()

    async def receive(self) -> Any:
        """The next part of the body; after the last, that the client has gone."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        while not (self.disconnected or self.response_complete):
            if not self._read and (self.parts or not self.more_body):
                parts, self.parts, self.waiting = self.parts, [], 0
                self._read = not self.more_body
                self.message_event.clear()
                # A single piece is passed on as it is.
                body = b"".join(parts)
                return {"type": "http.request", "body": body, "more_body": self.more_body}
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        return {"type": "http.disconnect"}


def _framing(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The header lines that say how long a body is; empty without one."""
    names = (b"content-length", b"transfer-encoding")
    return b"".join(name + b": " + value + b"\r\n" for name, value in headers if name in names)


def _split(url: bytes) -> tuple[bytes, bytes]:
    """Path, not decoded, and query of a request's target."""
    if url.startswith(b"/"):
        path, _, query = url.partition(b"?")
        return path.partition(b"#")[0], query
    try:
        parsed = httptools.parse_url(url)  # as proxies write it: http://host/path
    except httptools.HttpParserInvalidURLError:
        return url, b""
    return parsed.path or url, parsed.query or b""
