"""Log lines of failed loads."""

from __future__ import annotations

import logging

from host.errors import HostError
from host.models.loading import VersionLoadError


class LoadFailureLog:
    """Chooses the level of each line about a failed load.

    A failure that a poll meets again is logged at debug level, as it was reported before.
    """

    def __init__(self) -> None:
        self._reported: dict[str, set[str]] = {}  # lines by model, since its last good load

    def lines_for(self, name: str, error: HostError, polled: bool) -> list[tuple[int, str]]:
        """Returns (level, line) pairs for a failed load of a model."""
        lines = [f"failed to load '{name}': {error.status_string}"]
        if isinstance(error, VersionLoadError):
            lines = error.lines
        reported = self._reported.setdefault(name, set()) if polled else set()
        levels = [logging.DEBUG if line in reported else logging.ERROR for line in lines]
        reported.update(lines)
        return list(zip(levels, lines, strict=True))

    def clear(self, name: str) -> None:
        """Reports the next failure of this model at error level again."""
        self._reported.pop(name, None)
