"""The request-response cycle of a request on the fast path, without a task."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from host.frontends.http.json_text import error_body
from host.frontends.http1.cycle import JOIN_UP_TO, STATUS_LINES, RequestConnection
from host.frontends.http1.header_cache import Body, FastHandler, FastRequest

_FAILURE = error_body("unexpected failure")
_INTERNAL_ERROR = (
    STATUS_LINES[500] + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(_FAILURE),
    (_FAILURE,),
)

_log = logging.getLogger("pbhost")


class FastPathCycle:
    """One complete request and its response."""

    __slots__ = (
        "response_complete",
        "keep_alive",
        "response_started",
        "_connection",
        "_disconnected",
        "_request",
    )

    def __init__(self, connection: RequestConnection) -> None:
        self.keep_alive = True
        self.response_started = False
        self.response_complete = False
        self._connection = connection
        self._disconnected = False
        self._request: FastRequest | None = None

    def start_request(self, handler: FastHandler, body: bytes) -> bool:
        """Calls the handler; False if the request needs a task."""
        try:
            request = handler(body, self._send_response)
        except Exception as error:  # a defect of ours
            _log.error("unexpected failure of an HTTP request", exc_info=error)
            if not self.response_complete:
                self._send_response(*_INTERNAL_ERROR)
            return True
        self._request = request
        return request is not None

    def client_disconnected(self) -> None:
        """Cancels the request after a disconnect of the client."""
        self._disconnected = True
        self.cancel()

    def cancel(self) -> None:
        """Cancels the request if its response is not sent yet."""
        if self._request is not None and not self.response_complete:
            self._request.cancel()

    def _send_response(self, head: bytes, parts: Sequence[Body]) -> None:
        self.response_started = self.response_complete = True
        connection = self._connection
        if self._disconnected:
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
        connection.response_complete()
