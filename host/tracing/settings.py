"""The trace settings of a server: one for all models, and those of single ones (protocol 7.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from host.errors import invalid_argument
from host.tracing.config import TENSORS, TIMESTAMPS, TRITON, TraceConfig
from host.tracing.setting import TraceSetting, TraceSettingValues, TraceSink

DescribedSettings = dict[str, str | list[str]]
"""Settings as clients see them."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a scope says itself; None is what it takes from the scope around it."""

    level: frozenset[str] | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None


SettingChanges = Mapping[str, Any]
"""New values by field of `Overrides`; None clears a field."""


class TraceSettings:
    """Found on every request while any is on, changed by clients."""

    def __init__(self, config: TraceConfig, sink: TraceSink) -> None:
        self._config = config
        self._sink = sink
        self._initial_values = TraceSettingValues(
            config.level, config.rate, config.count, config.log_frequency
        )
        self._global_overrides = Overrides()
        self._model_overrides: dict[str, Overrides] = {}
        self._global = TraceSetting(self._initial_values, sink)
        self._model_settings: dict[str, TraceSetting] = {}
        self.enabled = self._any_enabled()
        """Whether any requests might be traced."""

    def find(self, model: str) -> TraceSetting:
        """The setting for requests to a model."""
        return self._model_settings.get(model, self._global)

    def update(self, model: str, change: SettingChanges) -> None:
        """Change the setting of a model, or with "" that of all that have none of their own.

        Raises HostError, and has then changed nothing.
        """
        if model:
            overrides = replace(self._model_overrides.get(model, Overrides()), **change)
            values = _with_defaults(
                self._keep_remaining_count(overrides, self._model_settings.get(model), change),
                self._global_values(),
            )
            self._check_values(values)
            self._set_model(model, overrides, values)
        else:
            overrides = replace(self._global_overrides, **change)
            values = _with_defaults(
                self._keep_remaining_count(overrides, self._global, change), self._initial_values
            )
            self._check_values(values)
            self._global_overrides = overrides
            before, self._global = self._global, TraceSetting(values, self._sink)
            before.retire()
            for name, of_model in self._model_overrides.items():
                kept = self._keep_remaining_count(of_model, self._model_settings[name], {})
                self._set_model(name, of_model, _with_defaults(kept, values))
        self.enabled = self._any_enabled()

    def _global_values(self) -> TraceSettingValues:
        return self._global.remaining_values()

    @staticmethod
    def _keep_remaining_count(
        overrides: Overrides, setting: TraceSetting | None, change: SettingChanges
    ) -> Overrides:
        """With what is left of the scope's own count, unless that is changed."""
        if setting is None or overrides.count is None or "count" in change:
            return overrides
        return replace(overrides, count=setting.remaining)

    def _check_values(self, values: TraceSettingValues) -> None:
        if not values.level:
            return
        reason = ""
        if self._config.mode != TRITON:
            pass  # a rate of 0 leaves those requests that are part of a trace already
        elif not values.rate:
            reason = "sample rate must be non-zero"
        elif not self._config.file:
            reason = "trace file name is not given"
        if reason:
            raise invalid_argument(f"Attempting to set invalid trace setting :{reason}")

    def _set_model(self, model: str, overrides: Overrides, values: TraceSettingValues) -> None:
        before = self._model_settings.pop(model, None)
        if before is not None:
            before.retire()
        if overrides == Overrides():
            self._model_overrides.pop(model, None)
            return
        self._model_overrides = {**self._model_overrides, model: overrides}
        self._model_settings[model] = TraceSetting(values, self._sink)

    def _any_enabled(self) -> bool:
        config = self._config
        if config.mode == TRITON and not config.file:
            return False
        return self._global.enabled or any(
            setting.enabled for setting in self._model_settings.values()
        )

    def describe(self, model: str) -> DescribedSettings:
        """The setting of a model, or with "" the global one, in the order it is shown in."""
        values = self.find(model).remaining_values()
        level = [name for name in (TIMESTAMPS, TENSORS) if name in values.level]
        shown: DescribedSettings = {
            "trace_level": level or ["OFF"],
            "trace_rate": str(values.rate),
            "trace_count": str(values.count),
        }
        config = self._config
        if config.mode == TRITON:
            shown |= {"log_frequency": str(values.log_frequency), "trace_file": config.file}
        return shown | {"trace_mode": config.mode} | config.describe()

    def retire_all(self) -> None:
        """No more requests are traced, and what has been collected is written."""
        self.enabled = False
        for setting in (*self._model_settings.values(), self._global):
            setting.retire()


def _with_defaults(overrides: Overrides, defaults: TraceSettingValues) -> TraceSettingValues:
    """The values of a scope within another."""
    given = {f.name: getattr(overrides, f.name) for f in fields(overrides)}
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})
