"""The files outside of model directories that models have imported."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from host.repository.repository import Fingerprint, compute_fingerprint

_Entry = tuple[str, int, int]


class ImportedFiles:
    """The imported files by model, each as it was when a process of the model imported it first.

    The event loop reports files; any thread may ask for changes.
    """

    def __init__(self) -> None:
        self._files: dict[str, dict[str, _Entry]] = {}

    def report(self, model: str, files: Iterable[_Entry]) -> None:
        """Called with path, time and size of the files that a process of the model has imported."""
        known = self._files.setdefault(model, {})
        for file in files:
            known.setdefault(file[0], file)

    def compute_fingerprint(self, model: str, directory: Path) -> Fingerprint:
        """The fingerprint of the model's directory and of changed files. Blocks.

        Raises HostError INTERNAL if the directory cannot be read.
        """
        return compute_fingerprint(directory) | self.changes(model)

    def changes(self, model: str) -> Fingerprint:
        """The files that have changed since they were imported first. Blocks.

        Entries are as in the fingerprint of a model directory. A file that is gone has the number
        -1.
        """
        files = list(self._files.get(model, {}).values())
        return frozenset(now for before in files if (now := _entry(before[0])) != before)


def _entry(path: str) -> _Entry:
    try:
        status = os.stat(path)
    except OSError:
        return path, -1, -1
    return path, max(status.st_mtime_ns, status.st_ctime_ns), status.st_size
