"""One HTTP/1.1 connection, with size limits and timeouts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, MutableSet
from dataclasses import dataclass
from typing import Any, cast

from host.frontends.http.json_text import error_body
from host.frontends.http1.asgi import RAW_HEADER_NAMES, App, Message
from host.frontends.http1.cycle import STATUS_LINES, FastPathCycle, RequestResponseCycle
from host.frontends.http1.parser import (
    FoundRequest,
    HeadReader,
    MalformedRequest,
    RequestHead,
    RequestParser,
)
from host.frontends.receive_memory import MessageFiller
from host.frontends.sockets import SocketWriter, fill_from_socket

_log = logging.getLogger("pbhost")


MAX_CHUNKS = 65536
_TOO_MANY_CHUNKS = (
    f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks."
    " Send fewer or larger HTTP chunks."
)
_HEADERS_TOO_LARGE = "Request headers are too large"
_UNSUPPORTED_CODING = "Unsupported transfer encoding, only 'chunked' is supported."
_REQUEST_TIMEOUT = "The request did not arrive in time"
_MIN_FILLED_BYTES = 1 << 16  # bytes of a body; fewer are not worth another protocol
_MAX_UNREAD_BODY = 1 << 20  # bytes of a body that the application has not read


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The timeouts of a connection in seconds, and the size limit of headers in bytes.

    `header_timeout` limits the TLS handshake, and the time until the headers of a request are
    complete. In each `data_rate_interval`, a client must send `min_interval_bytes` bytes of a body,
    and must read some bytes of a pending response. `idle_timeout` is the time between two requests.
    `max_header_bytes` also limits the bytes between two parts of a body, and after the last one.
    """

    header_timeout: float = 60.0
    data_rate_interval: float = 60.0
    min_interval_bytes: int = 16384
    idle_timeout: float = 600.0
    max_header_bytes: int = 65536


class Http1Connection(asyncio.Protocol):
    """Answers the requests of one client in order, each on the fast path or in a task.

    When the client disconnects, the task is cancelled. The connection adds itself and its tasks to
    `connections` and `tasks`. `head_reader` finds the requests for the fast path.
    """

    transport: asyncio.Transport
    write_small: Callable[[bytes], None]

    def __init__(
        self,
        app: App,
        timeouts: Timeouts,
        connections: MutableSet[Any],
        tasks: MutableSet[asyncio.Task[None]],
        on_activity: Callable[[], None],
        head_reader: HeadReader | None = None,
    ) -> None:
        self._app = app
        self._on_activity = on_activity
        self._head_reader = head_reader
        self._timeouts = timeouts
        self._connections = connections
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._parser = RequestParser(self)
        self._scope: dict[str, Any] = {}  # the scope fields that all requests share
        # Requests: the one that arrives, the one in execution, and those that wait for it
        self._incoming_cycle: RequestResponseCycle | None = None
        self._active_cycle: RequestResponseCycle | FastPathCycle | None = None
        self._pipelined_cycles: deque[RequestResponseCycle] = deque()
        # Receiving
        self._receiving_request = False  # a request has started and is not complete
        self._in_headers = False
        self._held_data = b""  # a fast-path request without its whole body
        self._held_request: FoundRequest | None = None  # handler and body of the held data
        self._overhead_bytes = self._chunks = 0  # bytes since the last body part; chunks
        self._received_bytes = 0  # bytes since the last check
        self._reading_paused = False
        self._receive_timer: asyncio.TimerHandle | None = None  # runs while a request arrives
        # Sending
        self._writing_paused: asyncio.Event | None = None  # set when writing resumes
        self._error_response = b""  # sent before the connection closes
        self._last_unsent_bytes = 0  # bytes in the write buffer at the last check
        self._send_timer: asyncio.TimerHandle | None = None  # runs while writing is paused
        # Between requests
        self._had_request = False
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.write_small = SocketWriter(self.transport).write
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        own = transport.get_extra_info("sockname")
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "root_path": "",
            "client": peer[:2] if isinstance(peer, tuple) else None,
            "server": own[:2] if isinstance(own, tuple) else None,
        }
        self._idle_since = self._loop.time()
        self._idle_timer = self._loop.call_later(self._timeouts.header_timeout, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.closed.set_result(None)
        for timer in (self._receive_timer, self._send_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._pipelined_cycles.clear()
        self.resume_writing()
        if self._active_cycle is not None:
            self._active_cycle.client_disconnected()

    def data_received(self, data: bytes) -> None:
        # The rest of a request is not a new activity.
        if not (self._receiving_request or self._held_data):
            self._on_activity()
        if self._active_cycle is None and not self._receiving_request:
            found = None
            if self._held_data:
                data, found = self._held_data + data, self._held_request
                self._held_data, self._held_request = b"", None
            if self._try_fast_path(data, found):
                return
        self._parse(data)

    def fill(self, body: MessageFiller, size: int, done: Callable[[], None]) -> bool:
        """Starts to read the last `size` bytes of a body to their place; then calls `done`.

        Returns False for few bytes, and for TLS, whose bytes have to be decrypted first.
        """
        transport = self.transport
        if size < _MIN_FILLED_BYTES or self.closing or transport.get_extra_info("sslcontext"):
            return False

        def received(count: int) -> None:
            self._received_bytes += count

        def complete() -> None:
            self._parser = RequestParser(self)  # that of before waits for the body
            self._cancel_receive_timer()
            self.on_request_complete()
            done()

        fill_from_socket(transport, self, body, size, received, complete)
        self._reading_paused = False
        return True

    def _parse(self, data: bytes) -> None:
        self._received_bytes += len(data)
        self._overhead_bytes += len(data)
        try:
            self._parser.feed(data)
        except MalformedRequest as error:
            self._reject_request(400, f"malformed HTTP request: {error}")
        except Exception as error:  # a defect of ours; the state of the connection is unknown
            _log.error("unexpected failure of an HTTP connection", exc_info=error)
            self.transport.abort()
        if self._receiving_request and not self.closing:
            if self._overhead_bytes > self._timeouts.max_header_bytes:
                self._reject_request(431, _HEADERS_TOO_LARGE)
            elif self._receive_timer is None:
                limit = (
                    self._timeouts.header_timeout
                    if self._in_headers
                    else self._timeouts.data_rate_interval
                )
                self._receive_timer = self._loop.call_later(limit, self._check_receive_rate)
        else:
            self._cancel_receive_timer()

    def _try_fast_path(self, data: bytes, found: FoundRequest | None) -> bool:
        """Starts a request on the fast path, or holds it until its body arrives; False for neither.

        `found`: the held request, of which `data` has more. Many clients send head and body
        separately, but few send more than two parts.
        """
        if (
            self._head_reader is None
            or self._writing_paused is not None
            or self._error_response
            or self.transport.is_closing()
        ):
            return False
        request = found or self._head_reader.find_request(data)
        if request is None:
            return False
        handler, body_start, end = request
        if len(data) != end:
            if found is not None or len(data) > end:
                return False
            self._held_data, self._held_request = data, request
            self._receive_timer = self._loop.call_later(
                self._timeouts.data_rate_interval, self._check_receive_rate
            )
            return True
        if self._receive_timer is not None:
            self._cancel_receive_timer()
        cycle = self._active_cycle = FastPathCycle(self)
        if cycle.start_request(handler, data[body_start:]):
            self._had_request = True
            return True
        self._active_cycle = None
        return False

    @property
    def closing(self) -> bool:
        """Whether the connection ignores further data from the client."""
        return bool(self._error_response) or self.transport.is_closing()

    def resume_reading(self) -> None:
        """Resumes reading from the client."""
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """Stops writing: the client does not read."""
        self._writing_paused = asyncio.Event()
        if self._send_timer is None:
            self._last_unsent_bytes = -1
            self._check_send_progress()

    def resume_writing(self) -> None:
        """Continues writing: the client has read enough, or has disconnected."""
        if self._writing_paused is not None:
            self._writing_paused.set()
            self._writing_paused = None

    async def wait_until_writable(self) -> None:
        """Waits until the client has read enough of the sent data."""
        if self._writing_paused is not None:
            await self._writing_paused.wait()

    # Timeouts

    def _check_receive_rate(self) -> None:
        """Rejects the request if its headers are late or its body is too slow."""
        self._receive_timer = None
        self._parse_held_data()
        keeps_pace = (
            self._reading_paused or self._received_bytes >= self._timeouts.min_interval_bytes
        )
        if self._in_headers or not keeps_pace:
            self._reject_request(408, _REQUEST_TIMEOUT)
            return
        self._received_bytes = 0
        self._receive_timer = self._loop.call_later(
            self._timeouts.data_rate_interval, self._check_receive_rate
        )

    def _cancel_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _check_send_progress(self) -> None:
        """Aborts the connection if the client has read nothing since the last check."""
        self._send_timer = None
        if self._writing_paused is None or self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent == self._last_unsent_bytes:
            self.transport.abort()
            return
        self._last_unsent_bytes = unsent
        self._send_timer = self._loop.call_later(
            self._timeouts.data_rate_interval, self._check_send_progress
        )

    def _check_idle(self) -> None:
        """Closes an idle connection. This timer is not restarted for each request."""
        left = limit = (
            self._timeouts.idle_timeout if self._had_request else self._timeouts.header_timeout
        )
        if self._active_cycle is None and not self._receiving_request and not self._held_data:
            left = self._idle_since + limit - self._loop.time()
            if left <= 0.0:
                self.transport.close()
                return
        self._idle_timer = self._loop.call_later(left, self._check_idle)

    def _parse_held_data(self) -> None:
        """Parses a held request, so that it no longer waits for the fast path."""
        if self._held_data:
            held_data, self._held_data = self._held_data, b""
            self._parse(held_data)

    # Events of the parser

    def on_request_begin(self) -> None:
        """Starts to receive a request."""
        self._receiving_request = self._in_headers = True
        self._overhead_bytes = self._received_bytes = self._chunks = 0
        self._cancel_receive_timer()

    def on_head(self, head: RequestHead) -> None:
        """Starts a request, or queues it, when its head is complete."""
        if self.closing:
            return
        size, expects_continue = len(head.url), False
        for name, value in head.headers:
            size += len(name) + len(value)
            if name == b"expect" and value.lower() == b"100-continue":
                expects_continue = True
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                self._reject_request(501, _UNSUPPORTED_CODING)
                return
        if size > self._timeouts.max_header_bytes:
            self._reject_request(431, _HEADERS_TOO_LARGE)
            return
        self._in_headers = False
        self._cancel_receive_timer()  # it was the timeout of the headers
        path, query = head.split_url()
        scope: Message = {
            **self._scope,
            "http_version": head.version,
            "method": head.method,
            "path": path.decode("latin-1"),
            "raw_path": path,
            "query_string": query,
            "headers": head.headers,
            "extensions": {RAW_HEADER_NAMES: head.names},
        }
        self._had_request = True
        cycle = self._incoming_cycle = RequestResponseCycle(
            self, scope, head.keep_alive, expects_continue
        )
        if self._active_cycle is None and not self._pipelined_cycles:
            self._start_cycle(cycle)
        else:
            self._pipelined_cycles.append(cycle)
            self._pause_reading()

    def on_chunk(self) -> None:
        """Counts a chunk of a body."""
        self._chunks += 1

    def on_body(self, part: bytes) -> None:
        """Passes on a part of a body."""
        # The last, empty chunk is counted too, but it causes no call of this method.
        if self._chunks > MAX_CHUNKS:
            self._reject_request(400, _TOO_MANY_CHUNKS)
        self._overhead_bytes = 0
        cycle = self._incoming_cycle
        if cycle is None or cycle.response_complete or self.closing:
            return
        cycle.feed_body(part)
        if cycle.unread_bytes > _MAX_UNREAD_BODY:
            self._pause_reading()

    def on_request_complete(self) -> None:
        """Finishes the body of a request."""
        cycle = self._incoming_cycle
        if cycle is None or self.closing:
            return
        self._receiving_request = False
        self._idle_since = self._loop.time()
        if not self._pipelined_cycles:
            self.resume_reading()  # a disconnect is noticed only while reading
        cycle.feed_eof()

    # Responses

    def _start_cycle(self, cycle: RequestResponseCycle) -> None:
        self._active_cycle = cycle
        task = cycle.task = self._loop.create_task(cycle.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def response_complete(self) -> None:
        """Starts the next request after a complete response."""
        self._active_cycle = None
        self._idle_since = self._loop.time()
        if self.transport.is_closing():
            return
        if self._pipelined_cycles:
            self._start_cycle(self._pipelined_cycles.popleft())
        elif self._error_response:
            self._send_error_response()
        elif self._reading_paused:
            self.resume_reading()

    def shutdown(self) -> None:
        """Closes the connection after the responses to all received requests."""
        self._parse_held_data()
        last = self._pipelined_cycles[-1] if self._pipelined_cycles else self._active_cycle
        if last is None:
            self.transport.close()
        else:
            last.keep_alive = False

    @property
    def on_fast_path(self) -> bool:
        """Whether a request is being answered without a task."""
        return isinstance(self._active_cycle, FastPathCycle)

    def cancel_fast_path(self) -> None:
        """Cancels the request on the fast path; its client gets an error response."""
        if isinstance(self._active_cycle, FastPathCycle):
            self._active_cycle.cancel()

    def _reject_request(self, status: int, text: str) -> None:
        """Answers the incoming request with an error, and closes the connection.

        Earlier requests are answered first. A response that has started gets no error.
        """
        if self.closing:
            return
        body = error_body(text)
        self._error_response = (
            STATUS_LINES[status] + b"content-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        about = self._incoming_cycle if self._receiving_request and not self._in_headers else None
        if about is not None and about.response_complete:
            self.transport.close()  # the request is answered already
        elif self._pipelined_cycles and about is self._pipelined_cycles[-1]:
            self._pipelined_cycles.pop()
        elif self._active_cycle in (None, about):
            self._send_error_response()

    def _send_error_response(self) -> None:
        """Sends the error response, unless another response has started, and closes."""
        if self._active_cycle is None or not self._active_cycle.response_started:
            self.transport.write(self._error_response)
        self.transport.close()
