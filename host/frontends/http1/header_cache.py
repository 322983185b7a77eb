"""Caches request heads, so that repeated heads are not parsed again.

A client sends the same head, byte for byte, for each request of one kind. The cache finds the
handler of a known head. Parsing, scope and task take half of the CPU time of a small request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from host.frontends.http1.cycle import Header
from host.frontends.http1.parser import parse_head

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
