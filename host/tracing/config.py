"""What `--trace-config` says."""

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
"""What the words for a level mean, on a command line."""

_BATCHING = {
    "bsp_max_queue_size": ("OTEL_BSP_MAX_QUEUE_SIZE", 2048),
    "bsp_schedule_delay": ("OTEL_BSP_SCHEDULE_DELAY", 5000),
    "bsp_max_export_batch_size": ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
}
BATCHING = tuple(_BATCHING)
"""Settings of OpenTelemetry's batch processor; the delay is in milliseconds."""

_GLOBAL = ("rate", "level", "count", "mode")
_OF_MODE = {TRITON: ("file", "log-frequency"), OPENTELEMETRY: ("url", "resource", *BATCHING)}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Where a server's traces go, and the settings that it starts with.

    `level` is a set of TIMESTAMPS and TENSORS, empty for OFF; `count` -1 is no limit; `batching`
    has the values of BATCHING; `warnings` says what was given and has no effect.
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
        """From (mode or "", setting, value) each; of one given again, the last counts.

        Levels and resource attributes add up. The values have been checked.
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
        usual = cls()
        made = cls(
            level=level,
            rate=int(last.get(("", "rate"), usual.rate)),
            count=int(last.get(("", "count"), usual.count)),
            log_frequency=int(last.get((TRITON, "log-frequency"), usual.log_frequency)),
            mode=last.get(("", "mode"), usual.mode),
            file=last.get((TRITON, "file"), usual.file),
            url=last.get((OPENTELEMETRY, "url"), usual.url),
            resource=resource,
            batching={
                setting: _positive(
                    last.get((OPENTELEMETRY, setting)) or environment.get(variable, ""), number
                )
                for setting, (variable, number) in _BATCHING.items()
            },
        )
        return replace(made, warnings=(*warnings, *made._contradiction_warnings()))

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
        """The options of the mode, as clients see them behind the settings."""
        if self.mode == TRITON:
            return {}
        shown = {"url": self.url}
        if self.resource:
            shown["resource"] = ",".join(f"{name}={text}" for name, text in self.resource.items())
        return shown | {name: str(number) for name, number in self.batching.items()}


def _positive(text: str, usual: int) -> int:
    """The number that a text is; a variable that holds none is left alone, as the SDK does."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return number or usual
