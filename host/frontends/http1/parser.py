"""Parses HTTP/1.1 requests with httptools, and caches heads that repeat.

A client sends the same head, byte for byte, for each request of one kind. The cache finds the
handler of a known head. Parsing, scope and task take half of the CPU time of a small request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import httptools

from host.frontends.http1.cycle import Header

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


def parse_head(data: bytes) -> RequestHead | None:
    """Parses a complete head; None if it is malformed or asks for another protocol."""
    reading = _HeadParser()
    parser = httptools.HttpRequestParser(reading)
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    _complete_head(reading.head, parser)
    return reading.head


class _HeadParser:
    """Collects a head. httptools calls the methods."""

    def __init__(self) -> None:
        self.head = RequestHead()

    def on_url(self, url: bytes) -> None:
        self.head.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head.headers.append((name.lower(), value))


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


_MAX_HEAD_BYTES = 2048  # larger heads are not cached
_MAX_HEADS = 256  # the cache is cleared when it is full
_HEAD_END = b"\r\n\r\n"
_EXCLUDED_HEADERS = frozenset((b"transfer-encoding", b"expect", b"upgrade"))

Body = bytes | memoryview

ResponseCallback = Callable[[bytes, Sequence[Body]], None]
"""Takes the only response: its head without the empty last line, and the parts of its body."""


class FastRequest(Protocol):
    """A started request on the fast path."""

    def cancel(self) -> None:
        """Cancels the request. Its callback then gets an error response."""


FastHandler = Callable[[bytes, ResponseCallback], FastRequest | None]
"""Starts a request with a body. It can call the callback before it returns.

Returns None if the request needs a task.
"""

FastPath = Callable[[str, bytes, Sequence[Header]], FastHandler | None]
"""Returns the handler of requests with a method, a path (not decoded, with its query) and headers
(names in lowercase); None if they need a task.
"""


class HeaderCache:
    """The cached request heads of one application."""

    def __init__(self, fast_path: FastPath) -> None:
        self._fast_path = fast_path
        self._handlers: dict[bytes, tuple[FastHandler, int] | None] = {}

    def find_handler(self, data: bytes) -> tuple[FastHandler, int, int] | None:
        """Returns the handler of the request in `data`, the start of its body, and the number of
        missing bytes, which is negative if there are too many.

        None if the head is incomplete, or if the request needs a task.
        """
        end = data.find(_HEAD_END, 0, _MAX_HEAD_BYTES) + 4
        if end < 4:
            return None
        head = data[:end]
        known = self._handlers.get(head)
        if known is None:
            if head in self._handlers:
                return None
            known = self._remember(head)
            if known is None:
                return None
        handler, length = known
        return handler, end, end + length - len(data)

    def _remember(self, head: bytes) -> tuple[FastHandler, int] | None:
        if len(self._handlers) >= _MAX_HEADS:
            self._handlers.clear()
        self._handlers[head] = known = self._find_handler_of(head)
        return known

    def _find_handler_of(self, head: bytes) -> tuple[FastHandler, int] | None:
        parsed = parse_head(head)
        if parsed is None or parsed.version != "1.1" or not parsed.keep_alive:
            return None  # the parser of the connection reports any error
        names = [name for name, _ in parsed.headers]
        if names.count(b"content-length") != 1 or not _EXCLUDED_HEADERS.isdisjoint(names):
            return None
        length = int(dict(parsed.headers)[b"content-length"])
        handler = self._fast_path(parsed.method, parsed.url, parsed.headers) if length else None
        return None if handler is None else (handler, length)
