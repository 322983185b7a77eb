"""Parses HTTP/1.1 requests with httptools, and finds those that need no task.

Events, scope and task take half of the CPU time of a small request. The heads of whole requests are
parsed at once, without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Protocol

import httptools

from host.frontends.http1.asgi import Header
from host.frontends.inference_core import Cancellable

_FRAMING_HEADERS = frozenset((b"content-length", b"transfer-encoding"))
_METHOD_PATTERN = re.compile(rb"[A-Za-z_-]+(?= |\Z)")
_PARSER_METHODS = frozenset(b"GET POST HEAD PUT DELETE CONNECT OPTIONS TRACE PRI".split())
_UNKNOWN_METHOD_STAND_IN = b"PATCH"  # stands for all others, which no application has
_NOT_ASCII = re.compile(rb"[\x80-\xff]")


class MalformedRequest(Exception):
    """The data is not valid HTTP/1.1."""


@dataclass(slots=True)
class RequestHead:
    """The request line and headers. `headers` has lowercase names, `names` has those received."""

    url: bytes = b""
    headers: list[Header] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    method: str = ""
    version: str = ""
    keep_alive: bool = False

    def split_url(self) -> tuple[bytes, bytes]:
        """Returns the path, not decoded, and the query."""
        url = self.url
        if not url.startswith(b"/"):
            try:
                parsed = httptools.parse_url(url)  # as to proxies: http://host/path
            except httptools.HttpParserInvalidURLError:
                return url, b""
            return parsed.path or url, parsed.query or b""
        path, _, query = url.partition(b"?")
        return path, query


class RequestHandler(Protocol):
    """Receives the events of a parser."""

    @property
    def closing(self) -> bool:
        """Whether the parser must stop."""

    def on_request_begin(self) -> None:
        """Handles the start of a request."""

    def on_head(self, head: RequestHead) -> None:
        """Handles a complete head."""

    def on_chunk(self) -> None:
        """Handles the start of a chunk."""

    def on_body(self, part: bytes) -> None:
        """Handles a part of the body."""

    def on_request_complete(self) -> None:
        """Handles the end of a request."""


class RequestParser:
    """Parses requests and calls a handler. httptools calls the `on_` methods."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._parser = self._new_parser()
        self._upgrading = False
        self._in_head = False
        self._head = RequestHead()
        self._at_request_start = True  # the next data starts a request
        self._in_request_line = False  # the first line of a request is not complete

    def feed(self, data: bytes) -> None:
        """Parses received data. Raises MalformedRequest, or the error of a failed event."""
        if self._at_request_start or self._in_request_line:
            data = self._normalize_request_line(data)
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError:  # raised by an event
            raise
        except httptools.HttpParserError as error:
            raise MalformedRequest(str(error)) from None

    def _feed(self, data: bytes) -> None:
        while data and not self._handler.closing:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # A client can propose HTTP/2, but the server continues with 1.1. httptools stops
                # here, so a new parser continues with the framing headers of the body.
                framing = _framing_lines(self._head.headers)
                self._parser = self._new_parser()
                if framing:
                    self._upgrading = True
                    self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
                    self._upgrading = False
                data = data[upgrade.args[0] :]

    def _normalize_request_line(self, data: bytes) -> bytes:
        """Returns the data with a first line that httptools accepts.

        httptools rejects unknown methods, and paths that are not ASCII, which some clients send.
        Such bytes are percent-encoded. A second request in the same data is not changed.
        """
        end = data.find(b"\n")
        line = data if end < 0 else data[:end]
        method = b""
        if self._at_request_start:
            found = _METHOD_PATTERN.match(line)
            if found is None:
                return data
            method = found[0] if len(found[0]) < len(line) else b""  # the method may be incomplete
        self._in_request_line = end < 0
        if line.isascii() and (not method or method in _PARSER_METHODS):
            return data
        target = _NOT_ASCII.sub(lambda byte: b"%%%02X" % ord(byte[0]), line[len(method) :])
        known = method if not method or method in _PARSER_METHODS else _UNKNOWN_METHOD_STAND_IN
        return known + target + data[len(line) :]

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Some clients send both a length and chunks. The chunks count; see `_complete_head`.
        parser.set_dangerous_leniencies(lenient_chunked_length=True)
        return parser

    def on_message_begin(self) -> None:
        if not self._upgrading:
            self._head = RequestHead()
            self._in_head = True
            self._at_request_start = False
            self._handler.on_request_begin()

    def on_url(self, url: bytes) -> None:
        if not self._upgrading:
            self._head.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers after a chunked body are ignored.
        if self._in_head and not self._upgrading:
            self._head.headers.append((name.lower(), value))
            self._head.names.append(name)

    def on_headers_complete(self) -> None:
        if self._upgrading:
            return
        self._in_head = False
        _complete_head(self._head, self._parser)
        self._handler.on_head(self._head)

    def on_chunk_header(self) -> None:
        self._handler.on_chunk()

    def on_body(self, body: bytes) -> None:
        self._handler.on_body(body)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and _framing_lines(self._head.headers):
            return  # its body follows, see `_feed`
        self._at_request_start = True
        self._in_request_line = False
        self._handler.on_request_complete()


def _complete_head(head: RequestHead, parser: httptools.HttpRequestParser) -> None:
    head.method = parser.get_method().decode("ascii")
    head.version = parser.get_http_version()
    # A proxy may read a body with both framing headers in another way (request smuggling).
    clear = not {name for name, _ in head.headers} >= _FRAMING_HEADERS
    head.keep_alive = head.version != "1.0" and clear and parser.should_keep_alive()


def _framing_lines(headers: Iterable[Header]) -> bytes:
    """Returns the header lines that frame a body; empty without a body."""
    return b"".join(
        name + b": " + value + b"\r\n" for name, value in headers if name in _FRAMING_HEADERS
    )


_MAX_HEAD_BYTES = 2048  # requests with larger heads need a task
_HEAD_END = b"\r\n\r\n"
_EXCLUDED_HEADERS = frozenset((b"transfer-encoding", b"expect", b"upgrade"))

Body = bytes | memoryview

ResponseCallback = Callable[[bytes, Sequence[Body]], None]
"""Takes the only response: its head without the empty last line, and the parts of its body.

A request that is cancelled gets an error response.
"""


FastHandler = Callable[[bytes, ResponseCallback], Cancellable | None]
"""Starts a request with a body. It can call the callback before it returns.

Returns None if the request needs a task.
"""

FastPath = Callable[[bytes, Mapping[bytes, bytes]], FastHandler | None]
"""Returns the handler of a POST request with a path (not decoded, with its query) and headers
(names in lowercase; the first of a name counts); None if it needs a task.
"""


FoundRequest = tuple[FastHandler, int, int]
"""The handler of a request, and the start and end of its body in the received data."""


class HeadReader:
    """Reads the heads of requests that are received whole, for one application.

    Clients often send the same head again: the last one is kept.
    """

    def __init__(self, fast_path: FastPath) -> None:
        self._fast_path = fast_path
        self._last_head = b""
        self._last_found: tuple[FastHandler, int] | None = None

    def find_request(self, data: bytes) -> FoundRequest | None:
        """Returns the request at the start of `data`.

        None if the head is incomplete, or if the request needs a task.
        """
        end = data.find(_HEAD_END, 0, _MAX_HEAD_BYTES) + 4
        if end < 4 or not data.startswith(b"POST "):
            return None
        head = data[:end]
        if head != self._last_head:
            self._last_found = self._find_handler_of(head)
            self._last_head = head
        if self._last_found is None:
            return None
        handler, length = self._last_found
        return handler, end, end + length

    def _find_handler_of(self, head: bytes) -> tuple[FastHandler, int] | None:
        parts: list[bytes] = []
        fields: dict[bytes, bytes] = {}
        # httptools calls these C methods without a Python frame.
        parser = httptools.HttpRequestParser(
            SimpleNamespace(on_url=parts.append, on_header=fields.setdefault)
        )
        try:
            parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None  # the parser of the connection reports any error
        if not parser.should_keep_alive() or parser.get_http_version() != "1.1":
            return None
        fields = {name.lower(): fields[name] for name in reversed(fields)}
        length = int(fields.get(b"content-length", b"0"))
        if not length or not _EXCLUDED_HEADERS.isdisjoint(fields):
            return None
        handler = self._fast_path(b"".join(parts), fields)
        return None if handler is None else (handler, length)
