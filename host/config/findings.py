"""The results of checks: findings, their places in a file, errors of them, and lines to print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from host.errors import ErrorCode, HostError

Position = tuple[int, int]
"""Line and column, both counted from 1."""

_LAST_PART = re.compile(r"(\.[^.\[\]]+|\[[^\]]*\])$")
_FIRST_PART = re.compile(r"[^.\[]+")


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A configuration file: its path, and the positions of its fields by field path.

    Examples of field paths: `input[1].dims`, and `parameters[KEY]` for a map entry.
    """

    path: str
    positions: Mapping[str, Position] = field(default_factory=dict)

    def position(self, field_path: str) -> Position | None:
        """The position of the field, or of its nearest parent if the field is not in the file."""
        while field_path:
            if field_path in self.positions:
                return self.positions[field_path]
            shorter = _LAST_PART.sub("", field_path)
            if shorter == field_path:
                return None
            field_path = shorter
        return None

    def format_location(self, field_path: str) -> str:
        """The end of an error message that names the file, the position and the field."""
        position = self.position(field_path)
        place = self.path if position is None else "{}:{}:{}".format(self.path, *position)
        return f" ({place}, field '{field_path}')"

    def without_fields(self, names: Iterable[str]) -> ConfigSource:
        """The same file without the positions of the given top-level fields."""
        gone = set(names)
        kept = {
            path: position
            for path, position in self.positions.items()
            if (first := _FIRST_PART.match(path)) is None or first[0] not in gone
        }
        return replace(self, positions=kept)


class Finding(NamedTuple):
    """One problem of a configuration: its error text, and the path of the field.

    `advice` says what to do, if the text, which may be Triton's, does not.
    """

    text: str
    field: str
    code: ErrorCode = ErrorCode.INVALID_ARG
    advice: str = ""


Findings: TypeAlias = Iterator[Finding]


def raise_first(findings: Iterable[Finding], source: ConfigSource | None) -> None:
    """Raises the first finding, if any, as HostError. The text ends with its place in `source`."""
    error = first_error(findings, source)
    if error is not None:
        raise error


def first_error(findings: Iterable[Finding], source: ConfigSource | None) -> HostError | None:
    """The error that `raise_first` would raise."""
    for finding in findings:
        place = source.format_location(finding.field) if source is not None else ""
        text = finding.text + place
        if finding.advice:
            text += _after(text, finding.advice)
        return HostError(finding.code, text)
    return None


def _after(text: str, advice: str) -> str:
    return f" {advice[:1].upper()}{advice[1:]}" if text.endswith(".") else f"; {advice}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a file; `path` may be a URL.

    `field` is the path of the configuration field, "" for the whole file. `advice` says what to do.
    `position` is None if there is no line to point at, for example for a missing field. A
    `warning` does not prevent loading the model.
    """

    path: Path | str
    text: str
    field: str = ""
    advice: str = ""
    position: Position | None = None
    warning: bool = False

    @property
    def severity(self) -> str:
        """`warning` or `error`."""
        return "warning" if self.warning else "error"

    @property
    def sort_key(self) -> tuple[str, Position, str, str, str]:
        """The key that sorts problems by file and position."""
        return str(self.path), self.position or (0, 0), self.field, self.text, self.advice

    @property
    def format_line(self) -> str:
        """`path:line:column: error: field: text (advice)`, which editors and CI can parse."""
        place = ":".join(map(str, (self.path, *(self.position or ()))))
        said = f"{self.text} ({self.advice})" if self.advice else self.text
        parts = (place, self.severity, self.field, said)
        return " ".join(": ".join(part for part in parts if part).split())

    @property
    def to_dict(self) -> Mapping[str, Any]:
        """JSON-ready data; line and column are None without a position."""
        line, column = self.position or (None, None)
        return {
            "severity": self.severity,
            "file": str(self.path),
            "line": line,
            "column": column,
            "field": self.field,
            "problem": self.text,
            "suggestion": self.advice,
        }
