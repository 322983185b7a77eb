"""The texts that may name a sequence, whoever sends them: clients and models."""

from __future__ import annotations

from host.errors import unsupported

_LONGEST = 128  # bytes of UTF-8


def checked_correlation_text(text: str) -> str:
    """`text`, if it may name a sequence. Raises HostError UNSUPPORTED (config spec 5.1)."""
    if len(text.encode(errors="surrogatepass")) > _LONGEST:
        raise unsupported("string correlation ID cannot be longer than 128 characters")
    return text
