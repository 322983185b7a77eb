"""What is on disk: the models of the repositories, their versions and their files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from host.config.defaults import is_version
from host.config.schema import ModelConfig
from host.errors import HostError, internal, invalid_argument, unsupported
from host.repository.qualified_name import identity, may_be_named, split
from host.system.regular_file import check_regular

_log = logging.getLogger("pbhost")

_NOT_UNIQUE = "not unique across all model repositories"
_NOT_VERSIONS = frozenset({"warmup", "initial_state", "configs"})


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model as a directory. One that is `duplicated` stands in several repositories."""

    name: str
    path: Path
    duplicated: bool = False


@dataclass(frozen=True, slots=True)
class Scan:
    """What the repositories hold now, by name, or with namespaces by identity.

    The models of a repository that could not be read are absent from `models`; `failures` says
    which repositories these are, so that nobody takes their models for deleted.
    """

    models: dict[str, ModelDirectory] = field(default_factory=dict)
    failures: dict[Path, HostError] = field(default_factory=dict)

    @property
    def complaints(self) -> list[str]:
        """What an operator should read of it."""
        texts = [failure.message for failure in self.failures.values()]
        texts += [
            f"failed to poll model '{model.name}': {_NOT_UNIQUE}"
            for model in self.models.values()
            if model.duplicated
        ]
        return texts


class Repository:
    """The directories that models come from."""

    def __init__(self, paths: Iterable[Path], namespaces: bool = False) -> None:
        """`namespaces`: models of several repositories may share a name (configuration spec 8.9).

        Raises HostError unless every path is a directory.
        """
        self.paths = sorted(set(paths))
        self.namespaces = namespaces
        if not self.paths:
            raise invalid_argument("--model-repository must be specified")
        for path in self.paths:
            if not path.exists():
                raise _stat_failure(path)
            if not path.is_dir():
                raise invalid_argument("repository path is not a valid directory")

    def scan(self) -> Scan:
        """Every model of every repository. What is wrong is reported, not raised. Blocks."""
        found: dict[str, ModelDirectory] = {}
        failures: dict[Path, HostError] = {}
        for repository in self.paths:
            try:
                names = _subdirectories(repository)
            except HostError as error:
                message = f"failed to poll model repository '{repository}': {error.message}"
                failures[repository] = HostError(error.code, message)
                continue
            for name in names:
                if self.namespaces:
                    if not may_be_named(name):
                        _log.warning("ignore model directory '%s' which has '::' in its name", name)
                        continue
                    known = identity(str(repository), name)
                    found[known] = ModelDirectory(name, repository / name)
                    continue
                duplicated = name in found
                path = found[name].path if duplicated else repository / name
                found[name] = ModelDirectory(name, path, duplicated)
        return Scan({name: found[name] for name in sorted(found)}, failures)

    def identities(self, name: str) -> list[str]:
        """What goes by this name; without namespaces the name itself, whether or not. Blocks."""
        if not self.namespaces:
            return [name]
        return [
            identity(str(path), name)
            for path in self.paths
            if may_be_named(name) and _holds(path, name)
        ]

    def namespace_of(self, known: str) -> str:
        """The repository that a model belongs to, "" without namespaces."""
        return split(known)[0] if self.namespaces else ""

    def members(self, ensemble: str, names: Iterable[str]) -> dict[str, str]:
        """As `member`, for several names."""
        return {name: self.member(ensemble, name) for name in names}

    def member(self, ensemble: str, name: str) -> str:
        """The identity of what an ensemble calls by this name. Blocks.

        What lies beside it comes first, then the only one there is; else it is the bare name.
        """
        known = self.identities(name)
        beside = identity(self.namespace_of(ensemble), name)
        if beside in known:
            return beside
        return known[0] if len(known) == 1 else name

    def find(self, known: str) -> ModelDirectory:
        """One model, by its identity, whatever state the others are in. Blocks.

        Raises HostError INTERNAL if it lies nowhere, or in two repositories.
        """
        space = self.namespace_of(known)
        name = split(known)[1] if self.namespaces else known
        paths = [path for path in self.paths if not space or str(path) == space]
        holders = [path for path in paths if _holds(path, name)]
        if self.namespaces and not space and len(holders) == 1:
            holders = []  # that one goes by its identity
        if len(holders) > 1:
            raise internal(f"failed to poll model '{name}': {_NOT_UNIQUE}")
        if holders:
            return ModelDirectory(name, holders[0] / name)
        for path in paths:
            if not path.is_dir():
                raise internal(
                    f"failed to poll model repository '{path}': {_stat_failure(path).message}"
                )
        raise internal(f"failed to poll model '{name}': model not found in any model repository.")


def _holds(repository: Path, name: str) -> bool:
    """Whether there is a model of this name, which may be any text."""
    if not name or name != Path(name).name:
        return False
    # Of a name that no file can have, the answer is no.
    return _may_be_model(name) and os.path.isdir(repository / name)


def _may_be_model(name: str) -> bool:
    """Hidden directories and `__pycache__` are left by tools (`.git`, `.ipynb_checkpoints`).

    No one means them as models, so they are passed over although other servers report them as
    broken.
    """
    return not name.startswith(".") and name != "__pycache__"


def _subdirectories(repository: Path) -> list[str]:
    """Names of the model directories, sorted."""
    names = []
    try:
        entries = sorted(os.listdir(repository))
    except OSError:
        raise _stat_failure(repository) from None
    for name in entries:
        if not _may_be_model(name):
            continue
        try:
            (repository / name).stat()
        except OSError:
            raise _stat_failure(repository / name) from None
        if (repository / name).is_dir():
            names.append(name)
    return names


def _stat_failure(path: Path) -> HostError:
    return internal(f"failed to stat file {path}")


def versions(model_dir: Path) -> list[int]:
    """The versions that the model directory holds, ascending (configuration spec 1.2).

    Raises HostError INTERNAL if the directory cannot be read.
    """
    found = []
    try:
        entries = sorted(os.listdir(model_dir))
    except OSError:
        raise _stat_failure(model_dir) from None
    for name in entries:
        if name in _NOT_VERSIONS or not (model_dir / name).is_dir():
            continue
        if is_version(name):
            found.append(int(name))
        elif name.startswith("0"):
            _log.warning(
                "ignore version directory '%s' which contains leading zeros in its directory name",
                name,
            )
        elif not _belongs_to_model(model_dir / name):
            _log.warning(
                "ignore version directory '%s' which fails to convert to integral number", name
            )
    return sorted(found)


def _belongs_to_model(folder: Path) -> bool:
    """Whether a folder is no failed attempt at a version: a package that models import, a cache."""
    hidden = folder.name.startswith(".") or folder.name == "__pycache__"
    return hidden or (folder / "__init__.py").exists()


_CACHES = frozenset({"__pycache__", ".git", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache"})

_TEMPORARY = re.compile(
    # Vim: swap files and its probe of the folder; Emacs: locks and auto-saves; backups of both
    # and of others; JetBrains; GNOME; NFS: deleted but open; macOS: folder views
    r".*\.sw[a-p]|4913|\.#.*|#.*#|.*~|.*___jb_(tmp|old|bak)___|\.goutputstream-.*"
    r"|\.nfs.*|\.DS_Store"
).fullmatch
"""Files that come and go beside the ones that somebody edits."""

Stamp = frozenset[tuple[str, int, int]]
"""Every file of a model: path, time of the last change in nanoseconds, size in bytes.

Folders are there with zeros: an empty one may be a version.
"""


def stamp(model_dir: Path) -> Stamp:
    """What would differ had the model been changed.

    What running or editing it leaves beside it is no change. Names are compared as well as times,
    so that a removed file counts (configuration spec 8.4). Blocks.
    """
    found: set[tuple[str, int, int]] = set()
    walked: set[str] = set()
    for folder, folders, files in os.walk(model_dir, followlinks=True):
        real = os.path.realpath(folder)
        if real in walked:
            folders.clear()  # links may lead in circles
            continue
        walked.add(real)
        folders[:] = [name for name in folders if name not in _CACHES]
        found.update((os.path.join(folder, name), 0, 0) for name in folders)
        for path in (os.path.join(folder, name) for name in files if not _TEMPORARY(name)):
            try:
                status = os.stat(path)
            except OSError:
                continue  # a dangling link, or removed while we looked: it is not there
            found.add((path, max(status.st_mtime_ns, status.st_ctime_ns), status.st_size))
    return frozenset(found)


def select_versions(config: ModelConfig, available: Sequence[int]) -> list[int]:
    """The versions that the policy of a normalised configuration wants, ascending.

    Raises HostError INVALID_ARG if there is none of them.
    """
    policy = config.version_policy
    chosen = sorted(available)
    if policy.HasField("latest"):
        count = policy.latest.num_versions
        chosen = chosen[-count:] if count else []
    elif policy.HasField("specific"):
        wanted = sorted(set(policy.specific.versions))
        for version in wanted:
            if version not in available:
                _log.warning(
                    "version %d is specified for model '%s', but the version directory is not "
                    "present",
                    version,
                    config.name,
                )
        chosen = [version for version in wanted if version in available]
    if not chosen:
        raise invalid_argument(
            "at least one version must be available under the version policy of "
            f"model '{config.name}'"
        )
    return chosen


def model_file(model_dir: Path, version: int, config: ModelConfig) -> Path:
    """The file that implements a version. It need not exist.

    Its name may not lead out of the model's directory. Links may: they are the doing of whoever
    owns the repository, and common where files come from a store (configuration spec 1.7). Raises
    HostError INVALID_ARG for one that does, or that is a pipe, a socket or a device. Blocks.
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
    """The labels of each output that has a label file: one line per class (spec 1.7).

    Raises HostError: UNSUPPORTED for a file outside of the model's directory, INTERNAL for one that
    cannot be read.
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
    # Not Path.resolve, which fails where links lead in circles.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))
