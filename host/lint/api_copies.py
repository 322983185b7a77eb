"""Finds files of a model that are not imported because the API's modules have their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from host.lint.problem import Problem
from pb_utils._api_modules import API_MODULES, describe_copy, is_copy


def find_copies(directory: Path) -> Iterator[Problem]:
    """Yields a warning for each copy of the API in a model's folder. Reads files, so it blocks."""
    for folder, names, files in os.walk(directory):
        # A file on the path of imports: of the model's folder, or of one of its versions.
        whole = Path(folder) == directory or _is_version(Path(folder), directory)
        for file in map(Path, sorted([*files, *(f"{name}/__init__.py" for name in names)])):
            name = file.parts[0].removesuffix(".py")
            path = folder / file
            if whole and name in API_MODULES:
                found = path.is_file()
            else:
                found = name in (API_MODULES[0], "pb_utils") and is_copy(str(path))
            if found:
                fact, advice = describe_copy(packaged=not whole)
                yield Problem(path, f"it {fact}", advice=advice, warning=True)
        # Only what can be imported: data and environments may be large.
        names[:] = [
            name
            for name in names
            if name not in API_MODULES
            and (name.isidentifier() or _is_version(folder / Path(name), directory))
        ]


def _is_version(folder: Path, directory: Path) -> bool:
    return folder.parent == directory and folder.name.isdigit()
