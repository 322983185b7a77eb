"""HTTP/1.1 requests out of what a client sends, parsed by httptools."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import httptools

from host.frontends.http1.cycle import Header

_FRAMING = frozenset((b"content-length", b"transfer-encoding"))
_METHOD = re.compile(rb"[A-Za-z_-]+(?= |\Z)")
_METHODS = frozenset(b"GET POST HEAD PUT DELETE CONNECT OPTIONS TRACE PRI".split())
_OTHER_METHOD = b"PATCH"  # stands for all others, which no application has
_NOT_ASCII = re.compile(rb"[\x80-\xff]")


class Malformed(Exception):
    """What came is no HTTP/1.1."""


@dataclass(slots=True)
class Head:
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


class RequestEvents(Protocol):
    """Whoever hears of requests."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be read."""

    def begin(self) -> None:
        """A request begins."""

    def head(self, head: Head) -> None:
        """All that comes before its body is there."""

    def chunk(self) -> None:
        """A chunk of its body begins."""

    def body(self, part: bytes) -> None:
        """A part of its body."""

    def end(self) -> None:
        """It is complete."""


class RequestParser:
    """The methods that begin with `on_` are httptools'."""

    def __init__(self, events: RequestEvents) -> None:
        self._events = events
        self._parser = self._new_parser()
        self._upgrading = False
        self._in_head = False
        self._head = Head()
        self._between = True  # what comes next begins a request
        self._in_line = False  # the first line of a request is not complete

    def feed(self, data: bytes) -> None:
        """Take what has come. Raises Malformed, or another error if an event has failed."""
        if self._between or self._in_line:
            data = self._readable(data)
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError:  # of what an event has raised
            raise
        except httptools.HttpParserError as error:
            raise Malformed(str(error)) from None

    def _feed(self, data: bytes) -> None:
        while data and not self._events.over:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # Clients may propose HTTP/2. We go on with 1.1; the parser takes that for the end
                # of HTTP, so another one takes over, with what it has to know of the body.
                framing = _framing(self._head.headers)
                self._parser = self._new_parser()
                if framing:
                    self._upgrading = True
                    self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
                    self._upgrading = False
                data = data[upgrade.args[0] :]

    def _readable(self, data: bytes) -> bytes:
        """The same, with the first line as the parser takes it.

        It refuses methods that it does not know, and paths that are not ASCII, which some clients
        send as they are; the percent form of such a byte means the same. A request that begins
        behind another one's end in the same data is left as it is.
        """
        end = data.find(b"\n")
        line = data if end < 0 else data[:end]
        method = b""
        if self._between:
            found = _METHOD.match(line)
            if found is None:
                return data
            method = found[0] if len(found[0]) < len(line) else b""  # there may be more of it
        self._in_line = end < 0
        if line.isascii() and (not method or method in _METHODS):
            return data
        target = _NOT_ASCII.sub(lambda byte: b"%%%02X" % ord(byte[0]), line[len(method) :])
        known = method if not method or method in _METHODS else _OTHER_METHOD
        return known + target + data[len(line) :]

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Some clients send a length beside chunks. The chunks count; see `_complete`.
        parser.set_dangerous_leniencies(lenient_chunked_length=True)
        return parser

    def on_message_begin(self) -> None:
        if not self._upgrading:
            self._head = Head()
            self._in_head = True
            self._between = False
            self._events.begin()

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
        _complete(self._head, self._parser)
        self._events.head(self._head)

    def on_chunk_header(self) -> None:
        self._events.chunk()

    def on_body(self, body: bytes) -> None:
        self._events.body(body)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and _framing(self._head.headers):
            return  # its body is still to come, see `feed`
        self._between = True
        self._in_line = False
        self._events.end()


def parse_head(data: bytes) -> Head | None:
    """What these bytes say that are a whole head and nothing else; None if they are malformed, or
    ask for another protocol.
    """
    reading = _HeadOnly()
    parser = httptools.HttpRequestParser(reading)
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    _complete(reading.head, parser)
    return reading.head


class _HeadOnly:
    """The methods are httptools'."""

    def __init__(self) -> None:
        self.head = Head()

    def on_url(self, url: bytes) -> None:
        self.head.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head.headers.append((name.lower(), value))


def _complete(head: Head, parser: httptools.HttpRequestParser) -> None:
    head.method = parser.get_method().decode("ascii")
    head.version = parser.get_http_version()
    # Where both frame a body, somebody before us may have taken what follows for a part of it.
    clear = not {name for name, _ in head.headers} >= _FRAMING
    head.keep_alive = head.version != "1.0" and clear and parser.should_keep_alive()


def _framing(headers: Iterable[Header]) -> bytes:
    """The header lines that say how long a body is; empty without one."""
    return b"".join(name + b": " + value + b"\r\n" for name, value in headers if name in _FRAMING)
