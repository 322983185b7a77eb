"""One HTTP/1.1 connection, with limits and patience."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, MutableSet
from dataclasses import dataclass
from typing import Any, cast

from host.frontends.http1.cycle import RECEIVED_NAMES, STATUS_LINES, App, Cycle, Message
from host.frontends.http1.fast_path import PromptCycle
from host.frontends.http1.header_cache import Heads
from host.frontends.http1.parser import Head, Malformed, RequestParser
from host.frontends.socket_writer import SocketWriter

MOST_CHUNKS = 65536
_TOO_MANY_CHUNKS = (
    f"Chunked request body exceeds maximum of {MOST_CHUNKS} non-empty chunks."
    " Send fewer or larger HTTP chunks."
)
_LARGE_HEADERS = "Request headers are too large"
_OTHER_CODING = "Unsupported transfer encoding, only 'chunked' is supported."
_LATE = "The request did not arrive in time"
_HIGH_WATER = 1 << 20  # bytes of a body that wait for the application

_log = logging.getLogger("pbhost")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection may take for what, in seconds, and how large headers may be.

    `headers`: until TLS is set up, and until a request's headers are there, from its first byte or
    the connection's beginning. `pause`: a body must bring `pace` bytes in that time, and a client
    must have taken something of a response. `idle`: between two requests. `header_bytes` is as
    well the most that may come between two parts of a body, and after the last one.
    """

    headers: float = 60.0
    pause: float = 60.0
    pace: int = 16384
    idle: float = 600.0
    header_bytes: int = 65536


class Connection(asyncio.Protocol):
    """Answers a client's requests one after the other, without a task or with one each.

    The task is cancelled when the client goes. `connections` and `tasks` have what is open;
    `heads` has what needs none.
    """

    transport: asyncio.Transport
    write_small: Callable[[bytes], None]

    def __init__(
        self,
        app: App,
        patience: Patience,
        connections: MutableSet[Any],
        tasks: MutableSet[asyncio.Task[None]],
        heard: Callable[[], None],
        heads: Heads | None = None,
    ) -> None:
        self._app = app
        self._heard = heard
        self._heads = heads
        self._patience = patience
        self._connections = connections
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._parser = RequestParser(self)
        self._scope: dict[str, Any] = {}  # what all its requests have in common
        # Requests: the one that comes in, the one that is being answered, those that wait for that.
        self._incoming: Cycle | None = None
        self._running: Cycle | PromptCycle | None = None
        self._waiting: deque[Cycle] = deque()
        # What comes in
        self._begun = False  # a request, which is not complete yet
        self._in_headers = False
        self._held = b""  # a request that may need no task, whose body is not there yet
        self._aside = self._chunks = 0  # bytes since the last ones of a body; chunks of it
        self._received = 0  # bytes since the last look
        self._reading_paused = False
        self._slow: asyncio.TimerHandle | None = None  # runs while a request comes in
        # What goes out
        self._writing_paused: asyncio.Event | None = None  # set when that is over
        self._last_words = b""  # the answer to a request that ends the connection
        self._unsent = 0  # bytes that waited to be sent at the last look
        self._stuck: asyncio.TimerHandle | None = None  # runs while the client takes nothing
        # Between requests
        self._had_request = False
        self._quiet_since = 0.0
        self._quiet: asyncio.TimerHandle | None = None

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
        self._quiet_since = self._loop.time()
        self._quiet = self._loop.call_later(self._patience.headers, self._look_if_quiet)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.closed.set_result(None)
        for timer in (self._slow, self._stuck, self._quiet):
            if timer is not None:
                timer.cancel()
        self._waiting.clear()
        self.resume_writing()
        if self._running is not None:
            self._running.lose()

    def data_received(self, data: bytes) -> None:
        if not (self._begun or self._held):  # the rest of a request is no other one
            self._heard()
        if self._running is None and not self._begun:
            held, self._held = self._held, b""
            data = held + data if held else data
            if self._answer_promptly(data, not held):
                return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._received += len(data)
        self._aside += len(data)
        try:
            self._parser.feed(data)
        except Malformed as error:
            self._refuse(400, f"malformed HTTP request: {error}")
        except Exception as error:  # a defect of ours; the connection's state is not to be trusted
            _log.error("unexpected failure of an HTTP connection", exc_info=error)
            self.transport.abort()
        if self._begun and not self.over:
            if self._aside > self._patience.header_bytes:
                self._refuse(431, _LARGE_HEADERS)
            elif self._slow is None:
                limit = self._patience.headers if self._in_headers else self._patience.pause
                self._slow = self._loop.call_later(limit, self._look_if_slow)
        else:
            self._stop_hurrying()

    def _answer_promptly(self, data: bytes, may_wait: bool) -> bool:
        """Whether these bytes are a request that needs no task: it has begun, or its body waits.

        Many clients send the body after the head, but few in more than two parts altogether.
        """
        if self._heads is None or self._writing_paused is not None or self.over:
            return False
        found = self._heads.find(data)
        if found is None:
            return False
        start, begin, missing = found
        if missing:
            if may_wait and missing > 0:
                self._held = data
                self._slow = self._loop.call_later(self._patience.pause, self._look_if_slow)
            return bool(self._held)
        if self._slow is not None:
            self._stop_hurrying()
        cycle = self._running = PromptCycle(self)
        if cycle.begin(start, data[begin:]):
            self._had_request = True
            return True
        self._running = None
        return False

    @property
    def over(self) -> bool:
        """Whether nothing more is taken from this client."""
        return bool(self._last_words) or self.transport.is_closing()

    def resume_reading(self) -> None:
        """Let more come in."""
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        self._writing_paused = asyncio.Event()
        if self._stuck is None:
            self._unsent = -1
            self._look_if_stuck()

    def resume_writing(self) -> None:
        """It has taken most of it, or gone."""
        if self._writing_paused is not None:
            self._writing_paused.set()
            self._writing_paused = None

    async def writable(self) -> None:
        """Return once the client has taken enough of what it was sent."""
        if self._writing_paused is not None:
            await self._writing_paused.wait()

    # Patience

    def _look_if_slow(self) -> None:
        """The time for a request's headers is over, or it is time to see how its body comes."""
        self._slow = None
        self._release()
        keeps_pace = self._reading_paused or self._received >= self._patience.pace
        if self._in_headers or not keeps_pace:
            self._refuse(408, _LATE)
            return
        self._received = 0
        self._slow = self._loop.call_later(self._patience.pause, self._look_if_slow)

    def _stop_hurrying(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _look_if_stuck(self) -> None:
        """Give up a client that has taken nothing since the last look."""
        self._stuck = None
        if self._writing_paused is None or self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent == self._unsent:
            self.transport.abort()
            return
        self._unsent = unsent
        self._stuck = self._loop.call_later(self._patience.pause, self._look_if_stuck)

    def _look_if_quiet(self) -> None:
        """Close a connection without a request. There is no timer per request for that."""
        left = patience = self._patience.idle if self._had_request else self._patience.headers
        if self._running is None and not self._begun and not self._held:
            left = self._quiet_since + patience - self._loop.time()
            if left <= 0.0:
                self.transport.close()
                return
        self._quiet = self._loop.call_later(left, self._look_if_quiet)

    def _release(self) -> None:
        """Treat a request whose body has not come like any other."""
        if self._held:
            held, self._held = self._held, b""
            self._parse(held)

    # What the parser hears

    def begin(self) -> None:
        """A request begins."""
        self._begun = self._in_headers = True
        self._aside = self._received = self._chunks = 0
        self._stop_hurrying()

    def head(self, head: Head) -> None:
        """All that comes before a request's body is there."""
        if self.over:
            return
        size, go_ahead = len(head.url), False
        for name, value in head.headers:
            size += len(name) + len(value)
            if name == b"expect" and value.lower() == b"100-continue":
                go_ahead = True
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                self._refuse(501, _OTHER_CODING)
                return
        if size > self._patience.header_bytes:
            self._refuse(431, _LARGE_HEADERS)
            return
        self._in_headers = False
        self._stop_hurrying()  # it was about the headers
        path, query = head.split_url()
        scope: Message = {
            **self._scope,
            "http_version": head.version,
            "method": head.method,
            "path": path.decode("latin-1"),
            "raw_path": path,
            "query_string": query,
            "headers": head.headers,
            "extensions": {RECEIVED_NAMES: head.names},
        }
        self._had_request = True
        cycle = self._incoming = Cycle(self, scope, head.keep_alive, go_ahead)
        if self._running is None and not self._waiting:
            self._start(cycle)
        else:
            self._waiting.append(cycle)
            self._pause_reading()

    def chunk(self) -> None:
        """A chunk of a body begins."""
        self._chunks += 1

    def body(self, part: bytes) -> None:
        """A part of a body."""
        # The last, empty chunk is counted as well, but brings no body.
        if self._chunks > MOST_CHUNKS:
            self._refuse(400, _TOO_MANY_CHUNKS)
        self._aside = 0
        cycle = self._incoming
        if cycle is None or cycle.complete or self.over:
            return
        cycle.feed(part)
        if cycle.waiting > _HIGH_WATER:
            self._pause_reading()

    def end(self) -> None:
        """A request is complete."""
        cycle = self._incoming
        if cycle is None or self.over:
            return
        self._begun = False
        self._quiet_since = self._loop.time()
        if not self._waiting:
            self.resume_reading()  # only who reads notices that a client goes
        cycle.feed_end()

    # Answers

    def _start(self, cycle: Cycle) -> None:
        self._running = cycle
        task = cycle.task = self._loop.create_task(cycle.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def answered(self) -> None:
        """The running request is answered: the next one may begin."""
        self._running = None
        self._quiet_since = self._loop.time()
        if self.transport.is_closing():
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        elif self._last_words:
            self._say_last_words()
        else:
            self.resume_reading()

    def shutdown(self) -> None:
        """Close the connection once its request is answered."""
        self._release()
        last = self._waiting[-1] if self._waiting else self._running
        if last is None:
            self.transport.close()
        else:
            last.keep_alive = False

    @property
    def answers_promptly(self) -> bool:
        """Whether a request is being answered without a task."""
        return isinstance(self._running, PromptCycle)

    def give_up(self) -> None:
        """The time to answer what needs no task is over; it says so to its client."""
        if isinstance(self._running, PromptCycle):
            self._running.cancel()

    def _refuse(self, status: int, text: str) -> None:
        """Answer what comes in with an error, if no response has begun, and close the connection.

        Requests that came before it are answered first.
        """
        if self.over:
            return
        body = json.dumps({"error": text}, separators=(",", ":")).encode()
        self._last_words = (
            STATUS_LINES[status] + b"content-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        about = self._incoming if self._begun and not self._in_headers else None
        if about is not None and about.complete:
            self.transport.close()  # it has its answer
        elif self._waiting and about is self._waiting[-1]:
            self._waiting.pop()
        elif self._running in (None, about):
            self._say_last_words()

    def _say_last_words(self) -> None:
        """Say the last words, if they do not interrupt a response."""
        if self._running is None or not self._running.started:
            self.transport.write(self._last_words)
        self.transport.close()
