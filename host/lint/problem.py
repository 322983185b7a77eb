"""A problem of a model, as a line of text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host.config.findings import Position


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
