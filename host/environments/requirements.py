"""Reads the requirements of a model from its `requirements.txt` or `pyproject.toml`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host.errors import HostError, invalid_argument
from host.system.regular_file import read_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = "pyproject.toml"

STUB_REQUIREMENTS = ("numpy>=1.19", "pyzmq>=22", "msgspec>=0.18", "setproctitle>=1.2")
"""The packages that every stub needs, installed in addition."""

_INCLUDED = re.compile(r"\s*(?:-[rc]|--requirement|--constraint)[\s=]*([^\s=]+)")


@dataclass(frozen=True)
class Requirements:
    """The packages that a model needs.

    `path` is the model's file. `files` has the contents of this file and of the files that it
    includes. `dependencies` and `python` are `dependencies` and `requires-python` of a
    `pyproject.toml`.
    """

    path: Path
    files: dict[str, bytes]
    dependencies: list[str] = field(default_factory=list)
    python: str = ""

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


def read_requirements(path: Path) -> Requirements:
    """Read a requirements file. Raises HostError INVALID_ARG."""
    if path.name == PYPROJECT:
        return _read_project(path)
    files: dict[str, bytes] = {}
    _collect(path, path.parent, files)
    return Requirements(path, files)


def _collect(path: Path, base: Path, files: dict[str, bytes]) -> None:
    """Read a requirements file and the files that it includes, by the rules of pip."""
    name = str(path.relative_to(base)) if path.is_relative_to(base) else str(path)
    if name in files:
        return
    data = files[name] = _read_bytes(path)
    for line in data.decode(errors="replace").splitlines():
        included = _INCLUDED.match(line)
        if included and "://" not in included[1]:
            _collect(Path(os.path.normpath(path.parent / included[1])), base, files)


def _read_bytes(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise invalid_argument(f"cannot read the requirements {path}: {error.strerror}") from error


def _read_project(path: Path) -> Requirements:
    data = _read_bytes(path)
    try:
        project: dict[str, Any] = tomllib.loads(data.decode())["project"]
        listed = project["dependencies"]
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise _unusable_error(path, "[project] dependencies is not a list of strings")
        return Requirements(
            path, {PYPROJECT: data}, listed, str(project.get("requires-python", ""))
        )
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _unusable_error(path, str(error)) from error
    except (KeyError, TypeError):
        raise _unusable_error(path, "it has no list 'dependencies' in [project]") from None


def _unusable_error(path: Path, reason: str) -> HostError:
    return invalid_argument(f"cannot use the requirements {path}: {reason}")
