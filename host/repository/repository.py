"""A model repository: its models and versions, where they lie, and repository agents."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from host.config.defaults import (
    apply_version_policy,
    find_subdirectories,
    find_versions,
    is_version,
)
from host.config.schema import ModelConfig, is_ensemble
from host.errors import HostError, internal, invalid_argument, unsupported
from host.repository.fingerprint import Fingerprint, FingerprintFunction
from host.system.files import check_regular, read_file

_SEPARATOR = "::"


def qualified_name(namespace: str, name: str) -> str:
    """The key of a model in the server, and its name in the log; without a namespace its name."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def split_qualified_name(known: str) -> tuple[str, str]:
    """Namespace and name of a qualified name. With namespaces, names contain no `::`."""
    namespace, _, name = known.rpartition(_SEPARATOR)
    return namespace, name


def is_valid_model_name(name: str) -> bool:
    """Whether a model in a namespace can have this name."""
    return _SEPARATOR not in name


_MD5 = "MD5:"


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


_log = logging.getLogger("pbhost")

_LOOK_UP_SECONDS = 1.0
_SOON_SECONDS = 5.0  # the most that an index waits for a store

_NOT_UNIQUE = "not unique across all model repositories"
_NOT_VERSIONS = frozenset({"warmup", "initial_state", "configs"})


class FetchedDirectory(Protocol):
    """A model directory that is complete until `close`."""

    path: Path

    def keep(self) -> None:
        """Lets the use end with this process, even if it runs another program until then."""

    def close(self) -> None:
        """Ends the use. Blocks."""


class RepositorySource(Protocol):
    """One repository. `text`: the path or URL that it was given as.

    Its methods block, and raise HostError if the repository cannot be read.
    """

    text: str

    def check(self) -> None:
        """Raises HostError unless the repository can be read."""

    def models(self) -> list[ModelDirectory]:
        """The models, sorted by name."""

    def find(self, name: str) -> ModelDirectory | None:
        """The model of this name, which may be any text; None if there is none."""


@dataclass(slots=True)
class MirrorCounts:
    """What a mirror has done: objects fetched and found in the cache, bytes, seconds, failures."""

    listings: int = 0
    listing_seconds: float = 0.0
    fetched_objects: int = 0
    cached_objects: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    failures: int = 0


class StoredModel(Protocol):
    """A model in an object store, as it was when it was listed."""

    @property
    def root(self) -> str:
        """The place of the model, with which the paths in the fingerprint begin."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The files as they were listed. Raises HostError if they cannot be a model directory."""

    async def fetch(
        self,
        versions: Collection[int] | None = None,
        reads: Callable[[str, int], bool] | None = None,
    ) -> tuple[FetchedDirectory, Fingerprint]:
        """Returns a directory with the contents of these versions, or of all, and what is in it.

        `reads`: whether the content of a file is needed, by its path in the model and its size;
        other files are there without it. An object that has changed since is listed again: the
        fingerprint returned is that of the directory. Raises HostError.
        """


class RepositoryMirror(RepositorySource, Protocol):
    """A repository elsewhere: what it had when it was listed last, and its models in a cache.

    The directory of a model has all names, but only the contents of configuration files.
    """

    counts: MirrorCounts

    async def refresh(self, name: str = "") -> None:
        """Lists all models again, or one. An error is kept for the methods above."""

    def describe_fetch(self, name: str) -> str:
        """How far the fetch of a model is, "" if there is none."""

    async def disconnect(self) -> None:
        """Ends what reads the store; what was listed stays."""

    async def close(self) -> None:
        """Removes the directories of models, and ends what reads the store."""


class _Folder:
    """A repository that is a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = str(path)

    def check(self) -> None:
        if not self.path.exists():
            raise _stat_failure(self.path)
        if not self.path.is_dir():
            raise invalid_argument("repository path is not a valid directory")

    def models(self) -> list[ModelDirectory]:
        return [ModelDirectory(name, self.path / name) for name in _subdirectories(self.path)]

    def find(self, name: str) -> ModelDirectory | None:
        if not name or name != Path(name).name:
            return None
        # The answer is no for a name that no file can have.
        found = _may_be_model(name) and os.path.isdir(self.path / name)
        return ModelDirectory(name, self.path / name) if found else None


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """The directory of a model.

    `duplicated`: several repositories contain the model. `stored`: the model in its object store;
    None if the contents are in the directory.
    """

    name: str
    path: Path
    duplicated: bool = False
    stored: StoredModel | None = None

    def fingerprint(self, known: str, compute: FingerprintFunction) -> Fingerprint:
        """The fingerprint, by `compute` if the files are in the directory; `known`: the model.

        Blocks. Raises HostError.
        """
        return compute(known, self.path) if self.stored is None else self.stored.fingerprint

    def check(self) -> None:
        """Raises HostError if its files could not be listed, or its configuration not be read."""
        if self.stored is not None:
            self.stored.fingerprint  # noqa: B018  # raises the error


@dataclass(frozen=True, slots=True)
class RepositoryScan:
    """The models on disk by qualified name.

    Models of a repository that cannot be read are absent from `models`; `failures` names such
    repositories, so that their models are not taken for deleted.
    """

    models: dict[str, ModelDirectory] = field(default_factory=dict)
    failures: dict[str, HostError] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """Warnings for the operator."""
        texts = [failure.message for failure in self.failures.values()]
        texts += [
            f"failed to poll model '{model.name}': {_NOT_UNIQUE}"
            for model in self.models.values()
            if model.duplicated
        ]
        return texts


class Repository:
    """The model repositories: directories, and mirrors of those in object stores."""

    def __init__(
        self,
        paths: Iterable[Path],
        namespaces: bool = False,
        mirrors: Iterable[RepositoryMirror] = (),
    ) -> None:
        """`namespaces`: models of several repositories may share a name.

        Source: docs/reference/model-control.md, "Namespaces". Raises HostError
        without paths.
        """
        self.mirrors = sorted(mirrors, key=lambda mirror: mirror.text)
        self.namespaces = namespaces
        self._sources: list[RepositorySource] = [*map(_Folder, sorted(set(paths))), *self.mirrors]
        self._keeps_listing = False
        self._listing: asyncio.Task[None] | None = None
        self._looked_up = -_LOOK_UP_SECONDS
        if not self._sources:
            raise invalid_argument("--model-repository must be specified")

    async def refresh(self, name: str = "") -> None:
        """Lists what is in object stores again: all models, or one by its qualified name.

        For a model in a folder no store is asked: it may not answer.
        """
        if not self.mirrors or self._keeps_listing:
            return
        if name and not self.namespaces and await asyncio.to_thread(self._in_folder, name):
            return
        space, plain = self.namespace_of(name), split_qualified_name(name)[1]
        await asyncio.gather(
            *(one.refresh(plain) for one in self.mirrors if space in ("", one.text))
        )

    async def refresh_soon(self) -> None:
        """As `refresh`, but does not wait for long: then what was listed last counts."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.get_running_loop().create_task(self.refresh())
        listing = self._listing
        done, _ = await asyncio.wait([listing], timeout=_SOON_SECONDS)
        if done:
            listing.result()

    def _in_folder(self, name: str) -> bool:
        folders = (source for source in self._sources if isinstance(source, _Folder))
        return any(folder.find(name) is not None for folder in folders)

    async def look_up(self, name: str) -> None:
        """Lists a model that was not listed; one in a second, as requests may have any name."""
        known = any(mirror.find(name) is not None for mirror in self.mirrors)
        now = time.monotonic()
        if known or now - self._looked_up < _LOOK_UP_SECONDS or name != Path(name).name:
            return
        self._looked_up = now
        await self.refresh(name)

    @contextmanager
    def keep_listing(self) -> Iterator[None]:
        """While entered, `refresh` does nothing: everything is as it was listed last."""
        self._keeps_listing = True
        try:
            yield
        finally:
            self._keeps_listing = False

    def describe_fetch(self, known: str) -> str:
        """How far the fetch of a model is, by its qualified name; "" if there is none."""
        space, name = self.namespace_of(known), split_qualified_name(known)[1]
        mirrors = (one for one in self.mirrors if space in ("", one.text))
        return next(filter(None, (one.describe_fetch(name) for one in mirrors)), "")

    async def close(self) -> None:
        """Closes the mirrors."""
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.wait([self._listing])
        for mirror in self.mirrors:
            await mirror.close()

    def check_paths(self) -> None:
        """Raises HostError unless every repository can be read. Blocks."""
        for source in self._sources:
            source.check()

    def scan(self) -> RepositoryScan:
        """Finds every model of every repository. Reports errors in the result. Blocks."""
        found: dict[str, ModelDirectory] = {}
        failures: dict[str, HostError] = {}
        for source in self._sources:
            try:
                models = source.models()
            except HostError as error:
                message = f"failed to poll model repository '{source.text}': {error.message}"
                failures[source.text] = HostError(error.code, message)
                continue
            for model in models:
                name = model.name
                if self.namespaces:
                    if not is_valid_model_name(name):
                        _log.warning("ignore model directory '%s' which has '::' in its name", name)
                        continue
                    found[qualified_name(source.text, name)] = model
                elif name in found:
                    found[name] = replace(found[name], duplicated=True)
                else:
                    found[name] = model
        return RepositoryScan({name: found[name] for name in sorted(found)}, failures)

    def qualified_names(self, name: str) -> list[str]:
        """The qualified names of all models of this name; without namespaces the name itself.
        Blocks.
        """
        if not self.namespaces:
            return [name]
        return [
            qualified_name(source.text, name)
            for source in self._sources
            if is_valid_model_name(name) and source.find(name) is not None
        ]

    def namespace_of(self, known: str) -> str:
        """The repository of a model, "" without namespaces."""
        return split_qualified_name(known)[0] if self.namespaces else ""

    def resolve_step_models(self, ensemble: str, names: Iterable[str]) -> dict[str, str]:
        """As `resolve_step_model`, for several names."""
        return {name: self.resolve_step_model(ensemble, name) for name in names}

    def resolve_step_model(self, ensemble: str, name: str) -> str:
        """The qualified name of the model that an ensemble calls by this name. Blocks.

        The model in the ensemble's repository comes first, then the only model of this name;
        otherwise it is the bare name.
        """
        known = self.qualified_names(name)
        beside = qualified_name(self.namespace_of(ensemble), name)
        if beside in known:
            return beside
        return known[0] if len(known) == 1 else name

    def find_model_directory(self, known: str) -> ModelDirectory:
        """Finds one model by its qualified name, whatever the state of other models. Blocks.

        Raises HostError INTERNAL if no repository contains it, or more than one.
        """
        space = self.namespace_of(known)
        name = split_qualified_name(known)[1] if self.namespaces else known
        sources = [source for source in self._sources if not space or source.text == space]
        found = [model for source in sources if (model := source.find(name)) is not None]
        if self.namespaces and not space and len(found) == 1:
            found = []  # with namespaces, that repository is known
        if len(found) > 1:
            raise internal(f"failed to poll model '{name}': {_NOT_UNIQUE}")
        if found:
            return found[0]
        for source in sources:
            try:
                source.check()
            except HostError as error:
                raise internal(
                    f"failed to poll model repository '{source.text}': {error.message}"
                ) from None
        raise internal(f"failed to poll model '{name}': model not found in any model repository.")


def _may_be_model(name: str) -> bool:
    """Whether a directory may be a model: hidden ones and `__pycache__` belong to tools.

    Triton reports such directories as broken models; here they are skipped.
    """
    return not name.startswith(".") and name != "__pycache__"


def _subdirectories(repository: Path) -> list[str]:
    """The sorted names of the model directories."""
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
        if os.path.isdir(repository / name):
            names.append(name)
    return names


def _stat_failure(path: Path) -> HostError:
    return internal(f"failed to stat file {path}")


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
