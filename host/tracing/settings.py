"""The trace settings of a server: the global setting, and those of single models.

The rules are in docs/reference/protocol.md, "Trace settings".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from host.errors import invalid_argument
from host.tracing.config import TENSORS, TIMESTAMPS, TRITON, TraceConfig
from host.tracing.trace_setting import TraceSetting, TraceSettingValues, TraceSink

DescribedSettings = dict[str, str | list[str]]
"""Settings in the form in which clients read them."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """The values that one scope sets itself. None means: use the default of the scope."""

    level: frozenset[str] | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None

    def apply_to(self, defaults: TraceSettingValues) -> TraceSettingValues:
        """The defaults, with the values of this scope in their place."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(defaults, **{name: v for name, v in given.items() if v is not None})


SettingChanges = Mapping[str, Any]
"""New values by field of `Overrides`; None clears a field."""


class _Scope:
    """The overrides of one scope, and the setting that follows from them and from defaults."""

    def __init__(self, overrides: Overrides, defaults: TraceSettingValues, sink: TraceSink) -> None:
        self.overrides = overrides
        self.setting = TraceSetting(overrides.apply_to(defaults), sink)

    def remaining_overrides(self) -> Overrides:
        """The overrides for a new setting: an overridden count continues with what is left."""
        if self.overrides.count is None:
            return self.overrides
        return replace(self.overrides, count=self.setting.remaining)


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
        self._global = _Scope(Overrides(), self._initial_values, sink)
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
        current = Overrides() if scope is None else scope.remaining_overrides()
        overrides = replace(current, **change)
        defaults = self._global.setting.remaining_values()
        self._check_values(overrides.apply_to(defaults))
        self._replace_model(model, overrides, defaults)

    def _update_global(self, change: SettingChanges) -> None:
        overrides = replace(self._global.remaining_overrides(), **change)
        values = overrides.apply_to(self._initial_values)
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
        if overrides != Overrides():
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
