"""Runs commands in a working directory that is gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def without_directory(folder: Path) -> Sequence[str]:
    """The beginning of a command line: the rest runs in a folder that has been removed."""
    gone = folder / "gone"
    gone.mkdir()
    return ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone)]
