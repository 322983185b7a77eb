"""The one error vocabulary of the host; each door maps it to its own status table."""

from __future__ import annotations

import enum


class ErrorCode(enum.Enum):
    """What kind of failure it was. The value is the text used in status strings (protocol 0.1)."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARG = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"


class HostError(Exception):
    """A failure that is data: one code and one message, for whoever asked."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status_string(self) -> str:
        """`<Code text>: <message>`, as load reasons and the repository index print it."""
        return f"{self.code.value}: {self.message}"


def invalid_argument(message: str) -> HostError:
    """The caller sent something wrong."""
    return HostError(ErrorCode.INVALID_ARG, message)


def not_found(message: str) -> HostError:
    """The caller named something that does not exist."""
    return HostError(ErrorCode.NOT_FOUND, message)


def unavailable(message: str) -> HostError:
    """It exists but cannot answer now."""
    return HostError(ErrorCode.UNAVAILABLE, message)


def internal(message: str) -> HostError:
    """A model or the host failed."""
    return HostError(ErrorCode.INTERNAL, message)


def unsupported(message: str) -> HostError:
    """The request is understood and deliberately not served."""
    return HostError(ErrorCode.UNSUPPORTED, message)
