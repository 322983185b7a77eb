"""One HTTP request that is answered without a task, and its response on a connection."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from host.frontends.http1.cycle import JOIN_UP_TO, STATUS_LINES, Connection
from host.frontends.http1.header_cache import Body, Start, Work

_FAILED = (
    STATUS_LINES[500] + b"content-type: application/json\r\ncontent-length: 30\r\n",
    (b'{"error":"unexpected failure"}',),
)

_log = logging.getLogger("pbhost")


class PromptCycle:
    """Its request is complete. `started` and `complete` are said of the response."""

    __slots__ = ("complete", "keep_alive", "started", "_connection", "_lost", "_work")

    def __init__(self, connection: Connection) -> None:
        self.keep_alive = True
        self.started = False
        self.complete = False
        self._connection = connection
        self._lost = False
        self._work: Work | None = None

    def begin(self, start: Start, body: bytes) -> bool:
        """Have it answered; False if that needs a task after all."""
        try:
            work = start(body, self._respond)
        except Exception as error:  # a defect, which is to be seen in the log and by the client
            _log.error("unexpected failure of an HTTP request", exc_info=error)
            if not self.complete:
                self._respond(*_FAILED)
            return True
        self._work = work
        return work is not None

    def lose(self) -> None:
        """The client has gone."""
        self._lost = True
        self.cancel()

    def cancel(self) -> None:
        """End it now."""
        if self._work is not None and not self.complete:
            self._work.cancel()

    def _respond(self, head: bytes, parts: Sequence[Body]) -> None:
        self.started = self.complete = True
        connection = self._connection
        if self._lost:
            return
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        if sum(map(len, parts)) <= JOIN_UP_TO:
            connection.write_small(b"".join((head, end, *parts)))
        else:
            write = connection.transport.write
            write(head + end)
            for part in parts:
                write(part)
        if not self.keep_alive:
            connection.transport.close()
        connection.answered()
