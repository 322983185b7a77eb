"""Where each field of a configuration was written, for errors found after parsing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

Position = tuple[int, int]
"""Line and column, both from 1."""

_LAST_PART = re.compile(r"(\.[^.\[\]]+|\[[^\]]*\])$")
_FIRST_PART = re.compile(r"[^.\[]+")


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """One configuration file: its path, and the position of every field by its path.

    A field path reads `input[1].dims`; a map entry is addressed by its key, `parameters[KEY]`.
    """

    path: str
    positions: Mapping[str, Position] = field(default_factory=dict)

    def position(self, field_path: str) -> Position | None:
        """Where the field is, or what it is part of when the field itself was left out."""
        while field_path:
            if field_path in self.positions:
                return self.positions[field_path]
            shorter = _LAST_PART.sub("", field_path)
            if shorter == field_path:
                return None
            field_path = shorter
        return None

    def format_location(self, field_path: str) -> str:
        """The suffix that leads a reader of an error message to the field."""
        position = self.position(field_path)
        place = self.path if position is None else "{}:{}:{}".format(self.path, *position)
        return f" ({place}, field '{field_path}')"

    def without_fields(self, names: Iterable[str]) -> ConfigSource:
        """The same file, with the given top-level fields no longer answering for their content."""
        gone = set(names)
        kept = {
            path: position
            for path, position in self.positions.items()
            if (first := _FIRST_PART.match(path)) is None or first[0] not in gone
        }
        return replace(self, positions=kept)
