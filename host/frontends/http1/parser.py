"""HTTP/1.1 requests out of what a client sends, parsed by httptools."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
    """What came is no HTTP/1.1."""


@dataclass(slots=True)
class RequestHead:
    """What comes before a body. `names` are those of the headers as received; there they are in
    lowercase. `path` is not decoded.
    """

    url: bytes = b""
    headers: list[Header] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    method: str = ""
    version: str = ""
    keep_alive: bool = False

    def split_url(self) -> tuple[bytes, bytes]:
        """Path, not decoded, and query."""
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
    """Whoever hears of requests."""

    @property
    def closing(self) -> bool:
        """Whether nothing more is to be read."""

    def on_request_begin(self) -> None:
        """A request begins."""

    def on_head(self, head: RequestHead) -> None:
        """All that comes before its body is there."""

    def on_chunk(self) -> None:
        """A chunk of its body begins."""

    def on_body(self, part: bytes) -> None:
        """A part of its body."""

    def on_request_complete(self) -> None:
        """It is complete."""


class RequestParser:
    """The methods that begin with `on_` are httptools'."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._parser = self._new_parser()
        self._upgrading = False
        self._in_head = False
        self._head = RequestHead()
        self._at_request_start = True  # what comes next begins a request
        self._in_request_line = False  # the first line of a request is not complete

    def feed(self, data: bytes) -> None:
        """Take what has come. Raises MalformedRequest, or another error if an event has failed."""
        if self._at_request_start or self._in_request_line:
            data = self._normalize_request_line(data)
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError:  # of what an event has raised
            raise
        except httptools.HttpParserError as error:
            raise MalformedRequest(str(error)) from None

    def _feed(self, data: bytes) -> None:
        while data and not self._handler.closing:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # Clients may propose HTTP/2. We go on with 1.1; the parser takes that for the end
                # of HTTP, so another one takes over, with what it has to know of the body.
                framing = _framing_lines(self._head.headers)
                self._parser = self._new_parser()
                if framing:
                    self._upgrading = True
                    self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
                    self._upgrading = False
                data = data[upgrade.args[0] :]

    def _normalize_request_line(self, data: bytes) -> bytes:
        """The same, with the first line as the parser takes it.

        It refuses methods that it does not know, and paths that are not ASCII, which some clients
        send as they are; the percent form of such a byte means the same. A request that begins
        behind another one's end in the same data is left as it is.
        """
        end = data.find(b"\n")
        line = data if end < 0 else data[:end]
        method = b""
        if self._at_request_start:
            found = _METHOD_PATTERN.match(line)
            if found is None:
                return data
            method = found[0] if len(found[0]) < len(line) else b""  # there may be more of it
        self._in_request_line = end < 0
        if line.isascii() and (not method or method in _PARSER_METHODS):
            return data
        target = _NOT_ASCII.sub(lambda byte: b"%%%02X" % ord(byte[0]), line[len(method) :])
        known = method if not method or method in _PARSER_METHODS else _UNKNOWN_METHOD_STAND_IN
        return known + target + data[len(line) :]

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Some clients send a length beside chunks. The chunks count; see `_complete_head`.
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
        # What comes behind a body (trailers) is no header: it is too late to mean anything.
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
            return  # its body is still to come, see `feed`
        self._at_request_start = True
        self._in_request_line = False
        self._handler.on_request_complete()


def parse_head(data: bytes) -> RequestHead | None:
    """What these bytes say that are a whole head and nothing else; None if they are malformed, or
    ask for another protocol.
    """
    reading = _HeadParser()
    parser = httptools.HttpRequestParser(reading)
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    _complete_head(reading.head, parser)
    return reading.head


class _HeadParser:
    """The methods are httptools'."""

    def __init__(self) -> None:
        self.head = RequestHead()

    def on_url(self, url: bytes) -> None:
        self.head.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head.headers.append((name.lower(), value))


def _complete_head(head: RequestHead, parser: httptools.HttpRequestParser) -> None:
    head.method = parser.get_method().decode("ascii")
    head.version = parser.get_http_version()
    # Where both frame a body, somebody before us may have taken what follows for a part of it.
    clear = not {name for name, _ in head.headers} >= _FRAMING_HEADERS
    head.keep_alive = head.version != "1.0" and clear and parser.should_keep_alive()


def _framing_lines(headers: Iterable[Header]) -> bytes:
    """The header lines that say how long a body is; empty without one."""
    return b"".join(
        name + b": " + value + b"\r\n" for name, value in headers if name in _FRAMING_HEADERS
    )
