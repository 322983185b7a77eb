"""Trace settings: their values, those of models, and updates by clients.

The rules are in docs/reference/metrics.md, "Trace settings".
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from host.errors import invalid_argument, unsupported
from host.tracing.trace import TraceTree

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


@dataclass(frozen=True, slots=True)
class TraceSettingValues:
    """The values of one trace setting; `TraceConfig` says what they mean."""

    level: frozenset[str]
    rate: int
    count: int
    log_frequency: int


class TraceSink(Protocol):
    """Receives complete traces and writes or sends them."""

    def write_tree(self, setting: TraceSetting, tree: TraceTree) -> None:
        """Accepts a complete trace, which `setting` has sampled."""

    def flush_setting(self, setting: TraceSetting) -> None:
        """Writes what is buffered for a setting that is replaced and whose traces are complete."""

    def close(self) -> None:
        """Returns when everything is written or sent, or has failed. Blocks."""


class TraceSetting:
    """Decides which requests of one scope (all models, or one model) are traced.

    The values of a setting never change. A change makes a new setting and retires this one.
    `buffer` is for the sink: traces that are not yet written. `remaining` is how many traces may
    still be started, or -1 for no limit.
    """

    def __init__(self, values: TraceSettingValues, sink: TraceSink) -> None:
        self.values = values
        self.remaining = values.count
        self.buffer: list[str] = []
        self.pending_traces = 0
        """Traces that are started and not yet complete."""
        self._request_count = 0
        self._sink = sink
        self._retired = False

    @property
    def enabled(self) -> bool:
        """Whether the level is not OFF."""
        return bool(self.values.level)

    @property
    def timestamps(self) -> bool:
        """Whether the level has TIMESTAMPS."""
        return TIMESTAMPS in self.values.level

    @property
    def tensors(self) -> bool:
        """Whether the level has TENSORS."""
        return TENSORS in self.values.level

    def remaining_values(self) -> TraceSettingValues:
        """The values, with the remaining count instead of the original one."""
        values = self.values
        return TraceSettingValues(values.level, values.rate, self.remaining, values.log_frequency)

    def sample_request(self, forced: bool) -> TraceTree | None:
        """Counts a request. Returns a new trace tree if the request is traced, else None.

        A `forced` request is always traced, whatever the rate and the remaining count are.
        """
        sampled = False
        if self.values.rate and self.remaining:
            self._request_count += 1
            sampled = self._request_count % self.values.rate == 0
            if sampled and self.remaining > 0:
                self.remaining -= 1
        if not (sampled or forced):
            return None
        self.pending_traces += 1
        return TraceTree(self._on_complete, self.tensors)

    def _on_complete(self, tree: TraceTree) -> None:
        self.pending_traces -= 1
        self._sink.write_tree(self, tree)
        if self._retired and not self.pending_traces:
            self._sink.flush_setting(self)

    def retire(self) -> None:
        """Marks the setting as replaced. The sink flushes it when its last trace is complete."""
        self._retired = True
        if not self.pending_traces:
            self._sink.flush_setting(self)


DescribedSettings = dict[str, str | list[str]]
"""Settings in the form in which clients read them."""


Overrides = Mapping[str, Any]
"""The values that one scope sets itself, by field of `TraceSettingValues`."""

SettingChanges = Mapping[str, Any]
"""New values by field of `TraceSettingValues`; None clears the override of a field."""


def _change_overrides(overrides: Overrides, change: SettingChanges) -> Overrides:
    changed = {**overrides, **change}
    return {name: value for name, value in changed.items() if value is not None}


class _Scope:
    """The overrides of one scope, and the setting that follows from them and from defaults."""

    def __init__(self, overrides: Overrides, defaults: TraceSettingValues, sink: TraceSink) -> None:
        self.overrides = overrides
        self.setting = TraceSetting(replace(defaults, **overrides), sink)

    def remaining_overrides(self) -> Overrides:
        """The overrides for a new setting: an overridden count continues with what is left."""
        if "count" not in self.overrides:
            return self.overrides
        return {**self.overrides, "count": self.setting.remaining}


class TraceSettings:
    """Holds the global setting and the settings of models, and applies changes by clients.

    Defaults of the global setting are the values of `--trace-config`; defaults of a model are the
    current values of the global setting.
    """

    def __init__(self, config: TraceConfig, sink: TraceSink) -> None:
        self._config = config
        self._sink = sink
        self._initial_values = TraceSettingValues(
            config.level, config.rate, config.count, config.log_frequency
        )
        self._global = _Scope({}, self._initial_values, sink)
        self._models: dict[str, _Scope] = {}  # models with overrides
        self.enabled = self._any_enabled()
        """Whether requests of any scope may be traced."""

    def find(self, model: str) -> TraceSetting:
        """The setting that applies to requests to a model."""
        return self._models.get(model, self._global).setting

    def update(self, model: str, change: SettingChanges) -> None:
        """Changes the setting of a model, or the global setting if `model` is "".

        Raises HostError INVALID_ARG if no request could be traced then; nothing is changed.
        """
        if model:
            self._update_model(model, change)
        else:
            self._update_global(change)
        self.enabled = self._any_enabled()

    def _update_model(self, model: str, change: SettingChanges) -> None:
        scope = self._models.get(model)
        current = {} if scope is None else scope.remaining_overrides()
        overrides = _change_overrides(current, change)
        defaults = self._global.setting.remaining_values()
        self._check_values(replace(defaults, **overrides))
        self._replace_model(model, overrides, defaults)

    def _update_global(self, change: SettingChanges) -> None:
        overrides = _change_overrides(self._global.remaining_overrides(), change)
        values = replace(self._initial_values, **overrides)
        self._check_values(values)
        self._global.setting.retire()
        self._global = _Scope(overrides, self._initial_values, self._sink)
        for name, scope in list(self._models.items()):
            self._replace_model(name, scope.remaining_overrides(), values)

    def _replace_model(
        self, model: str, overrides: Overrides, defaults: TraceSettingValues
    ) -> None:
        """Retires the setting of a model. Without overrides, the model has none of its own."""
        scope = self._models.pop(model, None)
        if scope is not None:
            scope.setting.retire()
        if overrides:
            self._models[model] = _Scope(overrides, defaults, self._sink)

    def _check_values(self, values: TraceSettingValues) -> None:
        # In mode opentelemetry, a rate of 0 still traces requests that carry a trace context.
        if not values.level or self._config.mode != TRITON:
            return
        if not values.rate:
            reason = "sample rate must be non-zero"
        elif not self._config.file:
            reason = "trace file name is not given"
        else:
            return
        raise invalid_argument(f"Attempting to set invalid trace setting :{reason}")

    def _any_enabled(self) -> bool:
        config = self._config
        if config.mode == TRITON and not config.file:
            return False
        return any(scope.setting.enabled for scope in (self._global, *self._models.values()))

    def describe(self, model: str) -> DescribedSettings:
        """The setting of a model, or the global one if `model` is "", in the order of the docs."""
        values = self.find(model).remaining_values()
        level = [name for name in (TIMESTAMPS, TENSORS) if name in values.level]
        described: DescribedSettings = {
            "trace_level": level or ["OFF"],
            "trace_rate": str(values.rate),
            "trace_count": str(values.count),
        }
        config = self._config
        if config.mode == TRITON:
            described |= {"log_frequency": str(values.log_frequency), "trace_file": config.file}
        return described | {"trace_mode": config.mode} | config.describe()

    def retire_all(self) -> None:
        """Stops tracing requests, and has the sink write every trace that is complete."""
        self.enabled = False
        for scope in (*self._models.values(), self._global):
            scope.setting.retire()


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
