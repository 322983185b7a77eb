"""Overrides: a configuration, and files, that a client sends with a load."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from host.errors import internal, invalid_argument
from host.inference.request import Parameter
from host.system.files import PrivateDirectory

_FILE_PREFIX = "file:"
_TYPES: dict[type, str] = {bool: "BOOL", int: "INT", float: "DOUBLE", str: "STRING", bytes: "BYTES"}


@dataclass(frozen=True, slots=True)
class Override:
    """`config`: JSON. `files`: contents by path in the model directory.

    With files, the model has no others; without, those of the repository are used.
    """

    config: str
    files: Mapping[str, bytes] = field(default_factory=dict)


def parse_override(parameters: Mapping[str, Parameter | bytes]) -> Override | None:
    """Parses the parameters of a load: `config` (str) and `file:<path>` (bytes).

    Raises HostError INVALID_ARG (docs/reference/model-control.md, "Load requests").
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            if not isinstance(value, str):
                raise invalid_argument(
                    "Config parameter 'config' must have string type for its value"
                )
            config = value
        elif key.startswith(_FILE_PREFIX):
            if not isinstance(value, bytes):
                raise invalid_argument(f"File parameter '{key}' must have bytes type for its value")
            path = _normalize_file_path(key)
            if path in files:
                raise invalid_argument(f"Invalid file parameter '{key}', '{path}' is given twice")
            files[path] = value
        else:
            raise invalid_argument(
                f"Unrecognized load parameter '{key}' with type '{_TYPES[type(value)]}'"
            )
    for path in files:
        if any(str(parent) in files for parent in PurePosixPath(path).parents):
            raise invalid_argument(
                f"Invalid file parameter '{_FILE_PREFIX}{path}',"
                " directory has been created as a file"
            )
    if config is None:
        if files:
            raise invalid_argument(
                "Load parameter 'config' must be specified for model file override"
            )
        return None
    return Override(config, files)


def _normalize_file_path(key: str) -> str:
    """The normalised path of a file parameter. Raises HostError if it leads outside.

    As in Triton, the root of a path that starts with a slash is the model directory.
    """
    path = os.path.normpath(key.removeprefix(_FILE_PREFIX).lstrip("/"))
    if path in (".", "..") or path.startswith("../") or "\0" in path:
        raise invalid_argument(
            f"Invalid file parameter '{key}' with normalized path '{path}' must stay within model"
            " directory."
        )
    return path


class UploadedDirectories:
    """Model directories made of uploaded files, in a directory that only this user can enter.

    A directory that a killed server left is removed by the next server that needs one.
    """

    def __init__(self) -> None:
        self._folder: PrivateDirectory | None = None
        self._lock = threading.Lock()

    def write(self, files: Mapping[str, bytes]) -> Path:
        """Writes a new model directory. Blocks; any thread may call. Raises HostError INTERNAL."""
        with self._lock:
            try:
                self._folder = self._folder or PrivateDirectory()
                directory = Path(tempfile.mkdtemp(prefix="model-", dir=self._folder.path))
            except OSError as error:
                raise internal(
                    f"failed to create a directory for the files of a load: {error}"
                ) from error
        for relative, content in files.items():
            path = directory / relative
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except (OSError, UnicodeEncodeError) as error:
                self.remove(directory)
                raise internal(f"failed to open binary file for write {path}: {error}") from error
        return directory

    def remove(self, directory: Path) -> None:
        """Removes a directory that has no users. Blocks; any thread may call."""
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Removes all directories. Blocks."""
        with self._lock:
            if self._folder is not None:
                self._folder.close()
                self._folder = None


class ModelFiles:
    """The directory that versions of a model are loaded from, with a reference count.

    The creator holds the first reference. `discard` is called without any, in a thread.
    """

    def __init__(self, path: Path, discard: Callable[[], None] | None = None) -> None:
        self.path = path
        self._discard = discard
        self._users = 1

    def acquire(self) -> None:
        """Adds a reference."""
        self._users += 1

    def release(self) -> bool:
        """Drops a reference; returns whether the caller has to call `remove`."""
        self._users -= 1
        return self._discard is not None and not self._users

    def remove(self) -> None:
        """Gives the directory up. Blocks."""
        if self._discard is not None:
            self._discard()
