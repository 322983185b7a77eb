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

_LONGEST = 2048  # bytes of a head that is remembered
_MOST = 256  # of them
_END = b"\r\n\r\n"
_NOT_PLAIN = frozenset((b"transfer-encoding", b"expect", b"upgrade"))

Body = bytes | memoryview

Done = Callable[[bytes, Sequence[Body]], None]
"""Takes a response, once: its head, to which more lines and the empty one may be added, and the
parts of its body.
"""


class Work(Protocol):
    """A request that is being answered."""

    def cancel(self) -> None:
        """Nobody waits for the answer any more; or there is no time left for it.

        It is called, then, with what there is to say.
        """


Start = Callable[[bytes, Done], Work | None]
"""Answers a request with this body by calling the other, maybe before it returns.

None if the request has to go the usual way after all.
"""

Starter = Callable[[str, bytes, Sequence[Header]], Start | None]
"""What answers requests of this method, this path (not decoded, with its query) and these headers
(names in lowercase) without a task; None if nothing does.
"""


class Heads:
    """The heads that one application's clients have sent."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self._known: dict[bytes, tuple[Start, int] | None] = {}

    def find(self, data: bytes) -> tuple[Start, int, int] | None:
        """What answers the request that begins `data`, where its body begins, and how many bytes
        are missing; that is negative if there are too many.

        None if the head is not complete, or nothing answers it so.
        """
        end = data.find(_END, 0, _LONGEST) + 4
        if end < 4:
            return None
        head = data[:end]
        known = self._known.get(head)
        if known is None:
            if head in self._known:
                return None
            known = self._learn(head)
            if known is None:
                return None
        start, length = known
        return start, end, end + length - len(data)

    def _learn(self, head: bytes) -> tuple[Start, int] | None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[head] = known = self._understand(head)
        return known

    def _understand(self, head: bytes) -> tuple[Start, int] | None:
        parsed = parse_head(head)
        if parsed is None or parsed.version != "1.1" or not parsed.keep_alive:
            return None  # the connection's own parser says what is wrong with it, if anything is
        names = [name for name, _ in parsed.headers]
        if names.count(b"content-length") != 1 or not _NOT_PLAIN.isdisjoint(names):
            return None
        length = int(dict(parsed.headers)[b"content-length"])
        start = self._starter(parsed.method, parsed.url, parsed.headers) if length else None
        return None if start is None else (start, length)
