"""Errors in messages between the core and a frontend process."""

from __future__ import annotations

from host.errors import ErrorCode, HostError, TooManyRequests
from host.frontend_processes.messages import WireError
from host.models.registry import NotServedError


def encode_error(error: HostError) -> WireError:
    """Converts an error."""
    retry_after = error.retry_after if isinstance(error, TooManyRequests) else 0.0
    return WireError(
        error.code.value, error.message, isinstance(error, NotServedError), retry_after
    )


def decode_error(wire: WireError) -> HostError:
    """Converts an error back. Raises ValueError for an unknown code."""
    if wire.retry_after:
        return TooManyRequests(wire.message, wire.retry_after)
    kind = NotServedError if wire.not_served else HostError
    return kind(ErrorCode(wire.code), wire.message)
