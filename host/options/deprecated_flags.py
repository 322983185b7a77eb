"""Deprecated flags, and the flags that replace them."""

from __future__ import annotations

from typing import Any

from host.options.flags import BOOLEAN, BYTES, STRING, DeprecatedFlag, integer


def _trace(setting: str) -> Any:
    return lambda value: [("trace-config", f"{setting}={value}")]


DEPRECATED = [
    DeprecatedFlag(
        "strict-model-config",
        BOOLEAN,
        "Please use '--disable-auto-complete-config' instead.",
        lambda strict: [("disable-auto-complete-config", "")] if strict else [],
    ),
    DeprecatedFlag(
        "response-cache-byte-size",
        BYTES,
        "Please use --cache-config local,size=<bytes> instead.",
        lambda size: [("cache-config", f"local,size={size}")] if size else [],
    ),
    *(
        DeprecatedFlag(
            f"trace-{name}", kind, f"Please use --trace-config {setting}=<value>.", _trace(setting)
        )
        for name, kind, setting in (
            ("file", STRING, "triton,file"),
            ("level", STRING, "level"),
            ("rate", integer(0), "rate"),
            ("count", integer(-1), "count"),
            ("log-frequency", integer(0), "triton,log-frequency"),
        )
    ),
    DeprecatedFlag(
        "stay-awake",
        BOOLEAN,
        "Please use --busy-poll instead.",
        lambda enabled: [("busy-poll", str(enabled).lower())],
    ),
]
