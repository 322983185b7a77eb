"""Fingerprints of model directories, which tell whether files of a model have changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from host.errors import internal

CACHES = frozenset({"__pycache__", ".git", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache"})
"""Folders of tools, which do not belong to the model they lie in."""

_TEMPORARY = re.compile(
    # Vim: swap files and its probe of the folder; Emacs: locks and auto-saves; backups of both
    # and of others; JetBrains; GNOME; NFS: deleted but open; macOS: folder views
    r".*\.sw[a-p]|4913|\.#.*|#.*#|.*~|.*___jb_(tmp|old|bak)___|\.goutputstream-.*"
    r"|\.nfs.*|\.DS_Store"
).fullmatch
"""Matches temporary files of editors and file systems."""


Fingerprint = frozenset[tuple[str, int, int]]
"""Each file of a model: path, modification time in nanoseconds, size in bytes.

Folders have zeros; they count, as an empty folder may be a version. Of a model in an object store,
the path is a URL, and the time a number of the content.
"""


FingerprintFunction = Callable[[str, Path], Fingerprint]
"""The fingerprint of the model with this name and directory. Blocks. Raises HostError."""


def compute_fingerprint(model_dir: Path) -> Fingerprint:
    """The fingerprint of a model directory. Blocks.

    Files that running or editing a model leaves behind do not count. Names are compared as well as
    times, so that a removed file is a change (docs/reference/model-control.md,
    "Change detection"). Raises HostError INTERNAL if the directory cannot be read.
    """
    try:
        return _walk_files(model_dir)
    except OSError as error:
        raise internal(f"failed to read directory {model_dir}: {error.strerror}") from None


def _walk_files(model_dir: Path) -> Fingerprint:
    """The fingerprint. Raises OSError; unreadable folders below the directory are skipped."""
    found: set[tuple[str, int, int]] = set()
    walked: set[str] = set()

    def raise_for_top(error: OSError) -> None:
        if error.filename is None or error.filename == str(model_dir):
            raise error

    for folder, folders, files in os.walk(model_dir, onerror=raise_for_top, followlinks=True):
        real = os.path.realpath(folder)
        if real in walked:
            folders.clear()  # links may form cycles
            continue
        walked.add(real)
        folders[:] = [name for name in folders if name not in CACHES]
        found.update((os.path.join(folder, name), 0, 0) for name in folders)
        for path in (os.path.join(folder, name) for name in files if not _TEMPORARY(name)):
            try:
                status = os.stat(path)
            except OSError:
                continue  # a dangling link, or a file that was just removed
            found.add((path, max(status.st_mtime_ns, status.st_ctime_ns), status.st_size))
    return frozenset(found)


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
