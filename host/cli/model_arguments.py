"""Arguments and flags of the subcommands that read a model as `pbhost serve` does.

The other subcommands need none of its options, whose imports take longer than the rest of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from host.errors import invalid_argument
from host.options.options import Options
from host.repository.object_store.location import is_store_url
from host.repository.open_repository import fetch_model


def serve_flag(field: str) -> Any:
    """Returns a dataclass field with the default and the flag of this field of `Options`."""
    (same,) = (known for known in dataclasses.fields(Options) if known.name == field)
    if same.default is dataclasses.MISSING:
        assert same.default_factory is not dataclasses.MISSING
        return dataclasses.field(default_factory=same.default_factory, metadata=same.metadata)
    return dataclasses.field(default=same.default, metadata=same.metadata)


def find_model(place: str, cache: str) -> Path:
    """The model directory that a path names, or a URL after its files have been fetched.

    `cache`: the value of --repository-cache-directory. Raises HostError.
    """
    if not is_store_url(place):
        return Path(place)
    settings = Options(repository_cache_directory=cache).mirror_settings
    return asyncio.run(fetch_model(place, settings))


def reject_repository(directory: Path) -> None:
    """Raises HostError if the directory is a model repository instead of a model."""
    if is_model(directory):
        return
    for path in sorted(directory.glob("*/")):
        if is_model(path):
            raise invalid_argument(
                f"'{directory}' is a model repository, expected a model directory: '{path}'"
            )


def is_model(directory: Path) -> bool:
    """Whether a directory looks like a model; `glob` skips unreadable directories."""
    return any(directory.glob("config.pbtxt")) or any(directory.glob("[1-9]*/"))
