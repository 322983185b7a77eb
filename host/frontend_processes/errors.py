"""Errors in messages between the core and a frontend process."""

from __future__ import annotations

from host.errors import ErrorCode, HostError
from host.frontend_processes.messages import WireError
from host.models.registry import NotServedError


def encode_error(error: HostError) -> WireError:
    """Converts an error."""
    return WireError(error.code.value, error.message, isinstance(error, NotServedError))


def decode_error(wire: WireError) -> HostError:
    """Converts an error back. Raises ValueError for an unknown code."""
    kind = NotServedError if wire.not_served else HostError
    return kind(ErrorCode(wire.code), wire.message)
