"""The versions in a model's directory, and those of them that a configuration selects."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from host.config.schema import ModelConfig
from host.errors import internal

_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")
_MAX_VERSION = 2**63 - 1


def is_version(name: str) -> bool:
    """Whether this is the name of a version directory: `0`, or digits without a leading zero."""
    return _VERSION.fullmatch(name) is not None and int(name) <= _MAX_VERSION


def find_subdirectories(model_dir: Path) -> list[str]:
    """The sorted names of the directories in a model's directory, of versions and others. Blocks.

    Raises HostError INTERNAL if the directory cannot be read.
    """
    try:
        entries = sorted(os.listdir(model_dir))
    except OSError:
        raise internal(f"failed to stat file {model_dir}") from None
    return [name for name in entries if os.path.isdir(model_dir / name)]


def find_versions(model_dir: Path) -> list[int]:
    """The versions in the model directory, ascending. Blocks. Raises HostError INTERNAL."""
    return sorted(int(name) for name in find_subdirectories(model_dir) if is_version(name))


def apply_version_policy(config: ModelConfig, available: Iterable[int]) -> list[int]:
    """Those of the versions that the version policy selects, ascending."""
    policy, versions = config.version_policy, sorted(available)
    if policy.HasField("specific"):
        return [version for version in versions if version in policy.specific.versions]
    if policy.HasField("latest"):
        return versions[-policy.latest.num_versions :] if policy.latest.num_versions else []
    return versions
