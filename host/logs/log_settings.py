"""Log settings that clients can read and change while the server runs.

Source: docs/reference/metrics.md, "Log settings".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from host.errors import HostError, internal, invalid_argument, unavailable, unsupported
from host.logs.formats import FORMATS
from host.logs.log_handler import LogHandler, LogLines

LogSettingValue = bool | int | str

_MOST_VERBOSE = 0xFFFFFFFF  # gRPC has 32 bits for it
_SWITCHES = {"log_info": "info", "log_warning": "warning", "log_error": "error"}


@dataclass(frozen=True, slots=True)
class ErrorTexts:
    """The error texts of a frontend; the arguments are the setting's name, or the format."""

    boolean: Callable[[str], HostError]
    unsigned: Callable[[str], HostError]
    string: Callable[[str], HostError]
    unknown: Callable[[str], HostError]


def _json(expected: str) -> Callable[[str], HostError]:
    return lambda name: internal(f"attempt to access JSON non-{expected} as {expected}")


HTTP = ErrorTexts(
    _json("boolean"),
    _json("unsigned-integer"),
    _json("string"),
    lambda name: unavailable(f"invalid argument for --log_format, got: {name}"),
)
GRPC = ErrorTexts(
    lambda name: invalid_argument(f"expect boolean for '{name}'"),
    lambda name: invalid_argument(f"expect int32 for '{name}'"),
    lambda name: invalid_argument(f"expect string for '{name}'"),
    lambda name: invalid_argument(f"invalid argument for log_format, got: {name}"),
)


class LogSettings:
    """The settings of one log. `on_changed` is called after an update."""

    def __init__(self, log: LogHandler, on_changed: Callable[[], None]) -> None:
        self._log = log
        self._on_changed = on_changed

    def describe(self) -> dict[str, LogSettingValue]:
        """All settings by the names that clients know, in their documented order."""
        log = self._log
        return {
            "log_file": log.file,
            **{name: getattr(log, field) for name, field in _SWITCHES.items()},
            "log_verbose_level": log.verbose_level,
            "log_format": log.log_format,
        }

    def lines_after(self, number: int) -> LogLines:
        """The lines after the one with a number. Raises HostError if the log keeps no lines."""
        if self._log.tail is None:
            raise unavailable("the server keeps no lines of its log; --log-tail-lines was 0")
        return self._log.tail.lines_after(number)

    def update(
        self, given: Mapping[str, object], wording: ErrorTexts
    ) -> dict[str, LogSettingValue]:
        """Changes the given settings and returns all. Unknown names are ignored.

        Settings are changed in the order of `describe`. Raises HostError; those before the invalid
        one stay changed.
        """
        try:
            self._update(given, wording)
        finally:
            self._on_changed()
        return self.describe()

    def _update(self, given: Mapping[str, object], wording: ErrorTexts) -> None:
        log = self._log
        if "log_file" in given:
            raise unsupported("log file location can not be updated through network protocol")
        for name, field in _SWITCHES.items():
            if name in given:
                switch = given[name]
                if type(switch) is not bool:
                    raise wording.boolean(name)
                setattr(log, field, switch)
        if "log_verbose_level" in given:
            level = given["log_verbose_level"]
            if type(level) is not int or not 0 <= level <= _MOST_VERBOSE:
                raise wording.unsigned("log_verbose_level")
            log.verbose_level = level
        if "log_format" in given:
            log_format = given["log_format"]
            if type(log_format) is not str:
                raise wording.string("log_format")
            if log_format not in FORMATS:
                raise wording.unknown(log_format)
            log.log_format = log_format
