"""The HTTP status and the gRPC status of each error, and when its client may try again.

Those of the routes under `/v1` are in `host.frontends.openai.openai_errors`.
"""

from __future__ import annotations

import math

from host.errors import ErrorCode, HostError, TooManyRequests
from host.frontends.http1.asgi import Header

_STATUSES = {  # of HTTP, and of gRPC
    ErrorCode.CANCELLED: (400, 1),
    ErrorCode.UNKNOWN: (400, 2),
    ErrorCode.INVALID_ARG: (400, 3),
    ErrorCode.DEADLINE_EXCEEDED: (504, 4),
    ErrorCode.NOT_FOUND: (404, 5),
    ErrorCode.ALREADY_EXISTS: (400, 6),
    ErrorCode.PERMISSION_DENIED: (403, 7),
    ErrorCode.RESOURCE_EXHAUSTED: (429, 8),
    ErrorCode.UNSUPPORTED: (501, 12),
    ErrorCode.INTERNAL: (500, 13),
    ErrorCode.UNAVAILABLE: (503, 14),
    ErrorCode.UNAUTHENTICATED: (401, 16),
}
HTTP_STATUS = {code: http for code, (http, _) in _STATUSES.items()}
"""The HTTP status of each error code (docs/reference/protocol.md, "Error codes")."""
GRPC_STATUS = {code: grpc for code, (_, grpc) in _STATUSES.items()}
"""The gRPC status code of each error code."""


class HttpError(HostError):
    """An error that only HTTP has, with its status, and maybe headers of its response."""

    def __init__(self, message: str, status: int, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(ErrorCode.UNKNOWN, message)
        self.status = status
        self.headers = headers


def http_status(error: HostError) -> int:
    """Returns the HTTP status of an error."""
    return error.status if isinstance(error, HttpError) else HTTP_STATUS[error.code]


RETRY_METADATA = "grpc-retry-pushback-ms"
"""The trailing metadata that says when a refused client may try again (gRFC A6)."""


def retry_milliseconds(error: BaseException) -> int | None:
    """Returns the value of `RETRY_METADATA` for an error; None if the error has no such time."""
    return math.ceil(1000 * error.retry_after) if isinstance(error, TooManyRequests) else None


def error_headers(error: HostError) -> tuple[Header, ...]:
    """Returns the HTTP headers of an error: how to authenticate, when to try again, or its own."""
    if isinstance(error, HttpError):
        return error.headers
    if error.code is ErrorCode.UNAUTHENTICATED:
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, TooManyRequests):
        # HTTP has whole seconds; the second header has the exact time.
        return (
            (b"retry-after", b"%d" % math.ceil(error.retry_after)),
            (b"retry-after-ms", b"%d" % math.ceil(1000 * error.retry_after)),
        )
    return ()
