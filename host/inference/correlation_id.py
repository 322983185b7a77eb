"""Validates correlation ids, of clients and of models."""

from __future__ import annotations

from host.errors import unsupported

_LONGEST = 128  # bytes of UTF-8


def checked_correlation_text(text: str) -> str:
    """Returns `text` if it is a valid correlation id. Raises HostError UNSUPPORTED.

    Source: docs/reference/configuration-and-scheduling.md, "Identity of a sequence".
    """
    if len(text.encode(errors="surrogatepass")) > _LONGEST:
        raise unsupported("string correlation ID cannot be longer than 128 characters")
    return text
