"""The trace settings of a server: one for all models, and those of single ones (protocol 7.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from host.errors import invalid_argument
from host.tracing.config import TENSORS, TIMESTAMPS, TRITON, TraceConfig
from host.tracing.setting import Setting, Sink, Values

Shown = dict[str, str | list[str]]
"""Settings as clients see them."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a scope says itself; None is what it takes from the scope around it."""

    level: frozenset[str] | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None


Change = Mapping[str, Any]
"""New values by field of `Overrides`; None clears a field."""


class TraceSettings:
    """Found on every request while any is on, changed by clients."""

    def __init__(self, config: TraceConfig, sink: Sink) -> None:
        self._config = config
        self._sink = sink
        self._start = Values(config.level, config.rate, config.count, config.log_frequency)
        self._own = Overrides()
        self._own_of: dict[str, Overrides] = {}
        self._global = Setting(self._start, sink)
        self._of: dict[str, Setting] = {}
        self.on = self._any_on()
        """Whether any requests might be traced."""

    def find(self, model: str) -> Setting:
        """The setting for requests to a model."""
        return self._of.get(model, self._global)

    def update(self, model: str, change: Change) -> None:
        """Change the setting of a model, or with "" that of all that have none of their own.

        Raises HostError, and has then changed nothing.
        """
        if model:
            own = replace(self._own_of.get(model, Overrides()), **change)
            values = _complete(self._keep(own, self._of.get(model), change), self._current())
            self._check(values)
            self._set(model, own, values)
        else:
            own = replace(self._own, **change)
            values = _complete(self._keep(own, self._global, change), self._start)
            self._check(values)
            self._own = own
            before, self._global = self._global, Setting(values, self._sink)
            before.end()
            for name, of_model in self._own_of.items():
                kept = self._keep(of_model, self._of[name], {})
                self._set(name, of_model, _complete(kept, values))
        self.on = self._any_on()

    def _current(self) -> Values:
        return self._global.current()

    @staticmethod
    def _keep(own: Overrides, setting: Setting | None, change: Change) -> Overrides:
        """With what is left of the scope's own count, unless that is changed."""
        if setting is None or own.count is None or "count" in change:
            return own
        return replace(own, count=setting.left)

    def _check(self, values: Values) -> None:
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

    def _set(self, model: str, own: Overrides, values: Values) -> None:
        before = self._of.pop(model, None)
        if before is not None:
            before.end()
        if own == Overrides():
            self._own_of.pop(model, None)
            return
        self._own_of = {**self._own_of, model: own}
        self._of[model] = Setting(values, self._sink)

    def _any_on(self) -> bool:
        config = self._config
        if config.mode == TRITON and not config.file:
            return False
        return self._global.on or any(setting.on for setting in self._of.values())

    def describe(self, model: str) -> Shown:
        """The setting of a model, or with "" the global one, in the order it is shown in."""
        values = self.find(model).current()
        level = [name for name in (TIMESTAMPS, TENSORS) if name in values.level]
        shown: Shown = {
            "trace_level": level or ["OFF"],
            "trace_rate": str(values.rate),
            "trace_count": str(values.count),
        }
        config = self._config
        if config.mode == TRITON:
            shown |= {"log_frequency": str(values.log_frequency), "trace_file": config.file}
        return shown | {"trace_mode": config.mode} | config.described()

    def end(self) -> None:
        """No more requests are traced, and what has been collected is written."""
        self.on = False
        for setting in (*self._of.values(), self._global):
            setting.end()


def _complete(own: Overrides, around: Values) -> Values:
    """The values of a scope within another."""
    given = {f.name: getattr(own, f.name) for f in fields(own)}
    return replace(around, **{name: value for name, value in given.items() if value is not None})
