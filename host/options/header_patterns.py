"""Patterns of header names, in the syntax of RE2, for flags that forward headers."""

from __future__ import annotations

from typing import Any

from host.options.flags import InvalidValue


def header_pattern(pattern: str) -> Any:
    """Compiles a pattern of header names; its `search` takes a name. Raises InvalidValue.

    RE2 does not backtrack: the time of a search is proportional to the length of the name. A
    pattern whose compiled form takes more than 1 MiB is refused.
    """
    import re2  # imported here because it takes a megabyte, and few servers need it

    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        return re2.compile(f"(?i){pattern}", options)
    except re2.error as error:
        reason = error.args[0]
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise InvalidValue(
            f"invalid regular expression: {text}. Got {pattern}; the syntax is that of RE2"
        ) from None


def header_forward_pattern(pattern: str) -> None:
    """Raises InvalidValue for a pattern that cannot be compiled. An empty pattern is valid."""
    if pattern:
        header_pattern(pattern)
