"""The settings of `--trace-config`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

TIMESTAMPS, TENSORS = "TIMESTAMPS", "TENSORS"
TRITON, OPENTELEMETRY = "triton", "opentelemetry"

URL = "http://localhost:4318/v1/traces"

LEVELS: dict[str, frozenset[str]] = {
    "off": frozenset(),
    "false": frozenset(),
    "tensors": frozenset([TENSORS]),
    **dict.fromkeys(("true", "on", "min", "max", "timestamps"), frozenset([TIMESTAMPS])),
}
"""Trace levels by the words that `--trace-config=level=` accepts."""

_BATCHING = {
    "bsp_max_queue_size": ("OTEL_BSP_MAX_QUEUE_SIZE", 2048),
    "bsp_schedule_delay": ("OTEL_BSP_SCHEDULE_DELAY", 5000),
    "bsp_max_export_batch_size": ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
}
BATCHING = tuple(_BATCHING)
"""Settings of OpenTelemetry's `BatchSpanProcessor`; the delay is in milliseconds."""

_GLOBAL = ("rate", "level", "count", "mode")
_OF_MODE = {TRITON: ("file", "log-frequency"), OPENTELEMETRY: ("url", "resource", *BATCHING)}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Where a server's traces go, and the initial trace settings.

    `level` is a set of TIMESTAMPS and TENSORS, empty for OFF. Every `rate`th request is traced, at
    most `count` of them (-1: no limit). `log_frequency` is the number of traces per file (0: all in
    one file). `batching` has a value for each name in `BATCHING`. `warnings` are log lines about
    settings that have no effect.
    """

    level: frozenset[str] = frozenset()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    mode: str = TRITON
    file: str = ""
    url: str = URL
    resource: Mapping[str, str] = field(default_factory=dict)
    batching: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_settings(
        cls, settings: Iterable[tuple[str, str, str]], environment: Mapping[str, str] = os.environ
    ) -> TraceConfig:
        """Builds the configuration from tuples (mode or "", setting, value).

        The last value of a repeated setting is used; levels and resource attributes accumulate.
        The caller has validated the values.
        """
        level: frozenset[str] = frozenset()
        resource: dict[str, str] = {}
        last: dict[tuple[str, str], str] = {}
        warnings: list[str] = []
        for mode, setting, value in settings:
            if setting not in (_OF_MODE[mode] if mode else _GLOBAL):
                what = f"mode {mode}" if mode else "all modes"
                warnings.append(
                    f"--trace-config: setting '{setting}' of {what} is not used by this version"
                )
            elif setting == "level":
                level |= LEVELS[value.lower()]
            elif setting == "resource":
                name, _, text = value.partition("=")
                resource[name] = text
            else:
                last[mode, setting] = value
        default = cls()
        config = cls(
            level=level,
            rate=int(last.get(("", "rate"), default.rate)),
            count=int(last.get(("", "count"), default.count)),
            log_frequency=int(last.get((TRITON, "log-frequency"), default.log_frequency)),
            mode=last.get(("", "mode"), default.mode),
            file=last.get((TRITON, "file"), default.file),
            url=last.get((OPENTELEMETRY, "url"), default.url),
            resource=resource,
            batching={
                setting: _positive_number(
                    last.get((OPENTELEMETRY, setting)) or environment.get(variable, ""), number
                )
                for setting, (variable, number) in _BATCHING.items()
            },
        )
        return replace(config, warnings=(*warnings, *config._contradiction_warnings()))

    def _contradiction_warnings(self) -> list[str]:
        if not self.level:
            return []
        if self.mode == TRITON:
            if not self.file:
                return ["requests are not traced: trace file name is not given"]
            return [] if self.rate else ["requests are not traced: sample rate must be non-zero"]
        if TENSORS in self.level:
            return ["trace level TENSORS is not supported in mode opentelemetry"]
        return []

    def describe(self) -> dict[str, str]:
        """The options of mode opentelemetry, as clients read them after the trace settings."""
        if self.mode == TRITON:
            return {}
        described = {"url": self.url}
        if self.resource:
            described["resource"] = ",".join(
                f"{name}={text}" for name, text in self.resource.items()
            )
        return described | {name: str(number) for name, number in self.batching.items()}


def _positive_number(text: str, default: int) -> int:
    """A positive number as text, or the default for any other text, as OpenTelemetry's SDK does."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return number or default
