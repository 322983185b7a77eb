"""Errors of the host; each frontend maps their codes to its own status."""

from __future__ import annotations

import enum


class ErrorCode(enum.Enum):
    """The kind of an error. The value is its name in status strings.

    Source: docs/reference/protocol.md, "Error codes".
    """

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARG = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"
    DEADLINE_EXCEEDED = "Deadline exceeded"  # of clients: the server has not responded in time
    # Triton does not have these; they are errors of API keys.
    UNAUTHENTICATED = "Unauthenticated"
    PERMISSION_DENIED = "Permission denied"
    RESOURCE_EXHAUSTED = "Resource exhausted"


class HostError(Exception):
    """An error with a code and a message for the caller."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status_string(self) -> str:
        """`<code>: <message>`, as in load reasons and in the repository index."""
        return f"{self.code.value}: {self.message}"


class TooManyRequests(HostError):
    """The caller has reached a limit. `retry_after`: seconds after which it may try again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(ErrorCode.RESOURCE_EXHAUSTED, message)
        self.retry_after = retry_after


class ServiceStartError(HostError):
    """A service cannot start. The log has the reason; `summary` only names the service."""

    def __init__(self, error: HostError, summary: str) -> None:
        super().__init__(error.code, error.message)
        self.summary = summary


def invalid_argument(message: str) -> HostError:
    """The caller sent something invalid."""
    return HostError(ErrorCode.INVALID_ARG, message)


def not_found(message: str) -> HostError:
    """The caller named something that does not exist."""
    return HostError(ErrorCode.NOT_FOUND, message)


def unavailable(message: str) -> HostError:
    """The server or the model cannot answer now."""
    return HostError(ErrorCode.UNAVAILABLE, message)


def internal(message: str) -> HostError:
    """A model or the host failed."""
    return HostError(ErrorCode.INTERNAL, message)


def unexpected_failure(error: BaseException) -> HostError:
    """The error of a request that a defect of the server ended; the log has the traceback."""
    return internal(f"unexpected failure: {type(error).__name__}")


def unsupported(message: str) -> HostError:
    """The request is valid, but this host does not support it."""
    return HostError(ErrorCode.UNSUPPORTED, message)


def unauthenticated(message: str) -> HostError:
    """The caller sent no key, or an unknown one."""
    return HostError(ErrorCode.UNAUTHENTICATED, message)


def permission_denied(message: str) -> HostError:
    """The key of the caller does not allow the request."""
    return HostError(ErrorCode.PERMISSION_DENIED, message)
