"""What is wrong with a model, and where: a line for people, an object for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host.config.source import Position


@dataclass(frozen=True, slots=True)
class Problem:
    """`field` is what it is about, "" if that is the file; `advice` says what to do about it.

    A `warning` does not keep the model from being served. `position` is None for what stands
    nowhere, as what is missing.
    """

    path: Path
    text: str
    field: str = ""
    advice: str = ""
    position: Position | None = None
    warning: bool = False

    @property
    def severity(self) -> str:
        """In a word."""
        return "warning" if self.warning else "error"

    @property
    def sort_key(self) -> tuple[str, Position, str, str, str]:
        """Sorts by place."""
        return str(self.path), self.position or (0, 0), self.field, self.text, self.advice

    @property
    def format_line(self) -> str:
        """`path:line:column: error: field: text (suggestion)`, as editors and CI read it."""
        place = ":".join(map(str, (self.path, *(self.position or ()))))
        said = f"{self.text} ({self.advice})" if self.advice else self.text
        parts = (place, self.severity, self.field, said)
        return " ".join(": ".join(part for part in parts if part).split())

    @property
    def to_dict(self) -> Mapping[str, Any]:
        """Ready for JSON; line and column are null where there are none."""
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
