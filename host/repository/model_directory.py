"""A model directory: its versions, its files, and the repository agents that check it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from host.config.defaults import (
    apply_version_policy,
    find_subdirectories,
    find_versions,
    is_version,
)
from host.config.schema import ModelConfig, is_ensemble
from host.errors import internal, invalid_argument, unsupported
from host.repository.fingerprint import Fingerprint, FingerprintFunction
from host.repository.object_store.listed_model import ListedModel
from host.system.files import check_regular, read_file

_log = logging.getLogger("pbhost")

_NOT_VERSIONS = frozenset({"warmup", "initial_state", "configs"})
_MD5 = "MD5:"


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """The directory of a model.

    `duplicated`: several repositories contain the model. `stored`: the model in its object store;
    None if the contents are in the directory.
    """

    name: str
    path: Path
    duplicated: bool = False
    stored: ListedModel | None = None

    def fingerprint(self, known: str, compute: FingerprintFunction) -> Fingerprint:
        """The fingerprint, by `compute` if the files are in the directory; `known`: the model.

        Blocks. Raises HostError.
        """
        return compute(known, self.path) if self.stored is None else self.stored.fingerprint

    def check(self) -> None:
        """Raises HostError if its files could not be listed, or its configuration not be read."""
        if self.stored is not None and self.stored.error is not None:
            raise self.stored.error


def list_versions(model_dir: Path, filename: str = "") -> list[int]:
    """The versions in the model directory, ascending. Logs which other directories are ignored.

    `filename`: the model's file, in addition to those that frameworks have. Source:
    docs/reference/configuration-and-scheduling.md, "Version directories". Blocks. Raises HostError
    INTERNAL if the directory cannot be read.
    """
    for name in find_subdirectories(model_dir):
        if name in _NOT_VERSIONS or is_version(name):
            continue
        if name.startswith("0"):
            _log.warning(
                "ignore version directory '%s' which contains leading zeros in its directory name",
                name,
            )
        elif not _belongs_to_model(model_dir / name):
            _log.log(
                logging.WARNING if _holds_model(model_dir / name, filename) else logging.DEBUG,
                "ignore version directory '%s' which fails to convert to integral number",
                name,
            )
    return find_versions(model_dir)


def list_served_versions(model_dir: Path, config: ModelConfig) -> list[int]:
    """As `list_versions`; an ensemble without a version directory has version 1.

    An ensemble has no files of its own, and tools such as git keep no empty directories. Source:
    docs/reference/ensembles.md, "Ensembles".
    """
    found = list_versions(model_dir, config.default_model_filename)
    return found or ([1] if is_ensemble(config) else [])


def _belongs_to_model(folder: Path) -> bool:
    """Whether a folder without a number belongs to the model: an imported package, a cache."""
    hidden = folder.name.startswith(".") or folder.name == "__pycache__"
    return hidden or (folder / "__init__.py").exists()


def _holds_model(folder: Path, filename: str) -> bool:
    """Whether a folder without a number may be meant as a version; others hold assets."""
    return any(folder.glob("model.*")) or bool(filename) and os.path.exists(folder / filename)


def select_versions(config: ModelConfig, available: Sequence[int]) -> list[int]:
    """The versions that the version policy selects, ascending. Logs which are missing.

    Raises HostError INVALID_ARG if there are none.
    """
    chosen = apply_version_policy(config, available)
    for version in sorted(set(config.version_policy.specific.versions) - set(available)):
        _log.warning(
            "version %d is specified for model '%s', but the version directory is not present",
            version,
            config.name,
        )
    if not chosen:
        found = ", ".join(map(str, sorted(available)))
        raise invalid_argument(
            "at least one version must be available under the version policy of "
            f"model '{config.name}': "
            + (
                f"its versions are {found}"
                if found
                else "it has no version folder, such as '1' (its name must be a number)"
            )
        )
    return chosen


def model_file_path(model_dir: Path, version: int, config: ModelConfig) -> Path:
    """The file that implements a version, which need not exist. Blocks.

    Its name must not lead out of the model directory. Links may: the owner of the repository makes
    them, and they are common where files come from a store
    (docs/reference/configuration-and-scheduling.md, "Files of a model"). Raises HostError
    INVALID_ARG for a name that leads out, and for a pipe, a socket or a device.
    """
    path = Path(os.path.normpath(model_dir / str(version) / config.default_model_filename))
    if not path.is_relative_to(os.path.normpath(model_dir)):
        raise invalid_argument(
            f"model file path '{path}' in model '{config.name}' is outside model directory"
        )
    try:
        check_regular(path)
    except OSError as error:
        raise invalid_argument(
            f"model file '{path}' of model '{config.name}' cannot be read: {error.strerror}"
        ) from None
    return path


def read_labels(model_dir: Path, config: ModelConfig) -> dict[str, list[str]]:
    """The labels of each output that has a label file, one per line.

    Source: docs/reference/configuration-and-scheduling.md, "Files of a model". Raises HostError
    UNSUPPORTED for a file outside of the model directory, INTERNAL for one that cannot be read.
    """
    labels = {}
    for output in config.output:
        if not output.label_filename:
            continue
        path = model_dir / output.label_filename
        if not _inside(path, model_dir):
            raise unsupported(
                f"label file path '{path}' for output '{output.name}' in model "
                f"'{config.name}' is outside model directory"
            )
        try:
            check_regular(path)
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise internal(f"failed to open text file for read {path}: {reason}") from None
        lines = text.split("\n")
        labels[output.name] = lines[:-1] if lines[-1] == "" else lines
    return labels


def _inside(path: Path, directory: Path) -> bool:
    """Whether the path stays in the directory once links and `..` are resolved."""
    # Path.resolve would fail where links form cycles.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))


def run_agents(config: ModelConfig, directory: Path, installed: str) -> None:
    """Runs every agent that the configuration names on the model directory. Blocks.

    `installed`: the directory where Triton would look for agents. Raises HostError if an agent
    refuses the model, or if there is no such agent here.
    """
    for agent in config.model_repository_agents.agents:
        if agent.name != "checksum":
            raise invalid_argument(
                f"unable to find 'libtritonrepoagent_{agent.name}.so' for repo agent"
                f" '{agent.name}', searched: {installed}"
            )
        for key, digest in sorted(agent.parameters.items()):
            _check(key, digest, directory)


def _check(key: str, expected: str, directory: Path) -> None:
    name = key.removeprefix(_MD5)
    if name == key or not name:
        raise invalid_argument(
            f"repo agent 'checksum' takes parameters named '{_MD5}<file>', got '{key}'"
        )
    path = Path(os.path.normpath(directory / name))
    if not path.is_relative_to(os.path.normpath(directory)):
        raise invalid_argument(f"repo agent 'checksum': file {name} is outside model directory")
    try:
        found = hashlib.md5(read_file(path), usedforsecurity=False).hexdigest()
    except OSError as error:
        raise invalid_argument(
            f"repo agent 'checksum': failed to read file {name}: {error.strerror}"
        ) from None
    if found != expected.lower():
        raise invalid_argument(
            f"Mismatched MD5 hash for file {name}, expect: {expected}, got: {found}"
        )
