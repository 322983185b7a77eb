"""Heads of requests that clients send again and again, recognised instead of parsed.

A client's requests of one kind have the same head, byte by byte. What its application can answer
without a task it says once for a head; parsing, the scope and a task are half of the CPU time that
a small request takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from host.frontends.http1.cycle import Header
from host.frontends.http1.parser import parse_head

_MAX_HEAD_BYTES = 2048  # bytes of a head that is remembered
_MAX_HEADS = 256  # of them
_HEAD_END = b"\r\n\r\n"
_EXCLUDED_HEADERS = frozenset((b"transfer-encoding", b"expect", b"upgrade"))

Body = bytes | memoryview

ResponseCallback = Callable[[bytes, Sequence[Body]], None]
"""Takes a response, once: its head, to which more lines and the empty one may be added, and the
parts of its body.
"""


class FastRequest(Protocol):
    """A request that is being answered."""

    def cancel(self) -> None:
        """Nobody waits for the answer any more; or there is no time left for it.

        It is called, then, with what there is to say.
        """


FastHandler = Callable[[bytes, ResponseCallback], FastRequest | None]
"""Answers a request with this body by calling the other, maybe before it returns.

None if the request has to go the usual way after all.
"""

FastPath = Callable[[str, bytes, Sequence[Header]], FastHandler | None]
"""What answers requests of this method, this path (not decoded, with its query) and these headers
(names in lowercase) without a task; None if nothing does.
"""


class HeaderCache:
    """The heads that one application's clients have sent."""

    def __init__(self, fast_path: FastPath) -> None:
        self._fast_path = fast_path
        self._handlers: dict[bytes, tuple[FastHandler, int] | None] = {}

    def find_handler(self, data: bytes) -> tuple[FastHandler, int, int] | None:
        """What answers the request that begins `data`, where its body begins, and how many bytes
        are missing; that is negative if there are too many.

        None if the head is not complete, or nothing answers it so.
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
            return None  # the connection's own parser says what is wrong with it, if anything is
        names = [name for name, _ in parsed.headers]
        if names.count(b"content-length") != 1 or not _EXCLUDED_HEADERS.isdisjoint(names):
            return None
        length = int(dict(parsed.headers)[b"content-length"])
        handler = self._fast_path(parsed.method, parsed.url, parsed.headers) if length else None
        return None if handler is None else (handler, length)
