"""The model repositories: the models in folders and object stores, by name."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from host.errors import HostError, internal, invalid_argument
from host.repository.fingerprint import Fingerprint
from host.repository.model_directory import ModelDirectory
from host.repository.object_store.cache import Lease
from host.repository.object_store.listed_model import ListedModel
from host.repository.object_store.mirror import Reads, StoreMirror

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


_log = logging.getLogger("pbhost")

_LOOK_UP_SECONDS = 1.0
_SOON_SECONDS = 5.0  # the most that an index waits for a store

_NOT_UNIQUE = "not unique across all model repositories"


class _Folder:
    """A repository that is a directory. Its methods are those of `StoreMirror`, and block."""

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
        mirrors: Iterable[StoreMirror] = (),
    ) -> None:
        """`namespaces`: models of several repositories may share a name.

        Source: docs/reference/model-control.md, "Namespaces". Raises HostError
        without paths.
        """
        self.mirrors = sorted(mirrors, key=lambda mirror: mirror.text)
        self.namespaces = namespaces
        self._sources: list[_Folder | StoreMirror] = [
            *map(_Folder, sorted(set(paths))),
            *self.mirrors,
        ]
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

    async def fetch(
        self,
        model: ListedModel,
        versions: Collection[int] | None = None,
        reads: Reads | None = None,
    ) -> tuple[Lease, Fingerprint]:
        """As `StoreMirror.fetch`, of the repository that the model is in."""
        mirror = next(one for one in self.mirrors if one.text == model.repository)
        return await mirror.fetch(model, versions, reads)

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
