"""Errors of the host; each frontend maps their codes to its own status."""

from __future__ import annotations

import enum


class ErrorCode(enum.Enum):
    """The kind of an error. The value is its name in status strings.

    Source: docs/reference/protocol.md, 0.1.
    """

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARG = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"


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
