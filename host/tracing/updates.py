"""Parses and checks changes of trace settings by clients (docs/reference/protocol.md, "Trace
settings").
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from host.errors import invalid_argument, unsupported
from host.tracing.config import TENSORS, TIMESTAMPS

_NUMBERS = {
    "trace_rate": ("rate", 0, 2**32 - 1),
    "trace_count": ("count", -1, 2**31 - 1),
    "log_frequency": ("log_frequency", 0, 2**32 - 1),
}
NUMBERS = tuple(_NUMBERS)
"""Settings whose values are numbers; clients send them as strings."""

_LEVELS = ("OFF", TIMESTAMPS, TENSORS)
_MAX_LOGGED = 200  # characters of a client's text in a log line

_log = logging.getLogger("pbhost")

_INTEGER = re.compile(r"\s*([+-]?[0-9]+)")


def to_change(
    levels: Sequence[str] | None, numbers: Mapping[str, str | None], *, file: bool, space: str
) -> dict[str, Any]:
    """Converts a client's request to a change for `TraceSettings.update`.

    `levels` are the level names, None if the request has none; an empty list clears the level.
    A number that is None clears that setting. `file` says whether the request has a trace file.
    `space` is what precedes the value in the error text for `trace_count`: HTTP and gRPC differ.
    Raises HostError INVALID_ARG for invalid values and UNSUPPORTED for a trace file.
    """
    change: dict[str, Any] = {}
    if file:
        raise unsupported("trace file location can not be updated through network protocol")
    if levels is not None:
        _add_level(change, levels)
    for name in NUMBERS:
        if name in numbers:
            text = numbers[name]
            change[_NUMBERS[name][0]] = None if text is None else _number(name, text, space)
    return change


def _add_level(change: dict[str, Any], levels: Sequence[str]) -> None:
    if "OFF" in levels:
        if len(levels) > 1:
            raise invalid_argument("Expect only one trace level 'OFF' is specified")
        change["level"] = frozenset[str]()
    elif not levels:
        change["level"] = None
    elif known := frozenset(levels) & {TIMESTAMPS, TENSORS}:
        change["level"] = known
    if unknown := [level for level in levels if level not in _LEVELS]:
        _log.warning(
            "trace_level: %.*s is ignored; the levels are %s",
            _MAX_LOGGED,
            ", ".join(f"'{level}'" for level in unknown),
            ", ".join(_LEVELS),
        )


def _number(name: str, text: str, space: str) -> int:
    _, low, high = _NUMBERS[name]
    found = _INTEGER.fullmatch(text)
    if found is None:
        raise invalid_argument(f"Unable to parse '{name}', got: {text}")
    # int() refuses very long texts; they are out of range anyway.
    value = int(found[1]) if len(found[1]) < 40 else high + 1
    if name == "trace_count" and value < low:
        raise invalid_argument(
            f"Unable to parse 'trace_count'. Expecting value >= -1, got:{space}{text}"
        )
    if not low <= value <= high:
        raise invalid_argument(
            f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {text}"
        )
    return value
