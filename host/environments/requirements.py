"""Reads the requirements of a model from its `requirements.txt` or `pyproject.toml`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host.environments.requirements_file import (
    InvalidLine,
    decode_requirements,
    logical_lines,
    named_files,
    paths_of_requirement,
)
from host.errors import HostError, invalid_argument
from host.system.regular_file import read_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = "pyproject.toml"

STUB_REQUIREMENTS = ("numpy>=1.19", "pyzmq>=22", "msgspec>=0.18", "setproctitle>=1.2")
"""The packages that every stub needs, installed in addition."""


@dataclass(frozen=True)
class Requirements:
    """The packages that a model needs.

    `path` is the model's file. `files` has the contents of this file and of the files that it
    includes. `dependencies` and `python` are `dependencies` and `requires-python` of a
    `pyproject.toml`. `remote`: the file includes a URL. The file there may name any file of this
    machine, so the output of pip must not be shown.
    """

    path: Path
    files: dict[str, bytes]
    dependencies: list[str] = field(default_factory=list)
    python: str = ""
    remote: bool = False

    @property
    def key(self) -> str:
        """A hash of the contents and of the host's Python: the name of the environment's folder."""
        parts = [
            sys.implementation.cache_tag,
            sys.version,
            sys.base_prefix,
            sysconfig.get_platform(),
            *STUB_REQUIREMENTS,
            *(f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in self.files.items()),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def arguments(self) -> list[str]:
        """The arguments of `pip install`."""
        file = [] if self.path.name == PYPROJECT else ["--requirement", str(self.path)]
        return [*file, "--", *self.dependencies, *STUB_REQUIREMENTS]


def read_requirements(path: Path, directory: Path) -> Requirements:
    """Reads a requirements file of the model in `directory`.

    Raises HostError INVALID_ARG, also if the file names a file outside of the directory.
    """
    directory = directory.absolute()
    _check_inside(path, path, "it", directory)
    if path.name == PYPROJECT:
        return _read_project(path, directory)
    reader = _RequirementsReader(path.parent, directory)
    reader.read(path)
    return Requirements(path, reader.files, remote=reader.remote)


class _RequirementsReader:
    """Reads a requirements file and the files that it includes, by the rules of pip.

    pip runs in `base`; `directory` is the model's.
    """

    def __init__(self, base: Path, directory: Path) -> None:
        self._base = base
        self._directory = directory
        self.files: dict[str, bytes] = {}
        self.remote = False

    def read(self, path: Path) -> None:
        name = os.path.relpath(path, self._base)
        if name in self.files:
            return
        data = self.files[name] = _read_bytes(path)
        number = 0
        try:
            for number, line in logical_lines(decode_requirements(data)):
                named = named_files(line)
                self.remote = self.remote or named.remote
                for value in named.paths:
                    # pip looks for some of these beside the file, and for others in its folder.
                    for folder in {path.parent, self._base}:
                        self._check(folder / value, path, value, number)
                for value in named.includes:
                    included = path.parent / value
                    self._check(included, path, value, number)
                    self.read(Path(os.path.normpath(included)))
        except InvalidLine as problem:
            place = f"line {number}: " if number else ""
            raise _unusable_error(path, f"{place}{problem}") from None

    def _check(self, named: Path, path: Path, value: str, number: int) -> None:
        _check_inside(named, path, f"line {number} names '{value}', which", self._directory)


def _check_inside(named: Path, path: Path, subject: str, directory: Path) -> None:
    """Raises HostError unless a path stays in the directory, also once links are resolved."""
    written = Path(os.path.normpath(named)).is_relative_to(os.path.normpath(directory))
    resolved = Path(os.path.realpath(named)).is_relative_to(os.path.realpath(directory))
    if not (written and resolved):
        raise _unusable_error(path, f"{subject} is outside of the model's directory {directory}")


def _read_bytes(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise invalid_argument(f"cannot read the requirements {path}: {error.strerror}") from error


def _read_project(path: Path, directory: Path) -> Requirements:
    data = _read_bytes(path)
    try:
        project: dict[str, Any] = tomllib.loads(data.decode())["project"]
        listed = project["dependencies"]
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise _unusable_error(path, "[project] dependencies is not a list of strings")
        for item in listed:
            for value in paths_of_requirement(item):
                subject = f"[project] dependencies names '{value}', which"
                _check_inside(path.parent / value, path, subject, directory)
        return Requirements(
            path, {PYPROJECT: data}, listed, str(project.get("requires-python", ""))
        )
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _unusable_error(path, str(error)) from error
    except (KeyError, TypeError):
        raise _unusable_error(path, "it has no list 'dependencies' in [project]") from None


def _unusable_error(path: Path, reason: str) -> HostError:
    return invalid_argument(f"cannot use the requirements {path}: {reason}")
