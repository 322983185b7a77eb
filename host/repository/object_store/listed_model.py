"""The models in a listing of an object store."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from host.config.defaults import is_version
from host.errors import HostError, invalid_argument, unavailable
from host.repository.fingerprint import CACHES, Fingerprint
from host.repository.object_store.stored_object import UNLISTED, StoredObject

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as the store lists it; files by their paths in the model directory.

    `repository`: its URL. `error`: why it cannot be made a directory. `directory`: its stand-in, if
    that could be made.
    """

    repository: str
    name: str
    files: Mapping[str, StoredObject]
    folders: frozenset[str]
    listed: Fingerprint
    error: HostError | None = None
    directory: Path | None = None

    @property
    def root(self) -> str:
        """What the paths in the fingerprint begin with."""
        return f"{self.repository}/{self.name}"

    @property
    def fingerprint(self) -> Fingerprint:
        """The files as they were listed, by URL. Raises HostError."""
        if self.error is not None:
            raise self.error
        return self.listed

    @property
    def configs(self) -> dict[str, StoredObject]:
        """The configuration files."""
        return {path: stored for path, stored in self.files.items() if _is_config(path)}


def group_by_model(
    repository: str, found: Iterable[StoredObject]
) -> tuple[dict[str, ListedModel], dict[str, str]]:
    """The models of a listing, and objects that belong to none, with what they are."""
    by_name: dict[str, list[StoredObject]] = {}
    empty: set[str] = set()
    ignored: dict[str, str] = {}
    for stored in found:
        name, slash, rest = stored.path.partition("/")
        if not _is_path(stored.path) and stored.size != UNLISTED:
            ignored[stored.path] = "which no file can be named"
        elif not slash and not stored.size:
            empty.add(name)  # or the mark of a folder
        elif slash:
            by_name.setdefault(name, [])
            if stored.size == UNLISTED or CACHES.isdisjoint(rest.split("/")):
                by_name[name].append(stored)
    models = {
        name: _listed_model(repository, name, objects)
        for name, objects in by_name.items()
        if not name.startswith(".") and name != "__pycache__"
    }
    marks = empty - by_name.keys()  # of jobs
    return models, ignored | dict.fromkeys(marks, "an empty object that is no folder")


def _is_path(path: str) -> bool:
    """Whether a key is the path of a file below a folder."""
    return {"", ".", ".."}.isdisjoint(path.split("/")) and not _CONTROL.search(path)


def _listed_model(repository: str, name: str, objects: Iterable[StoredObject]) -> ListedModel:
    root = f"{repository}/{name}"
    files = {stored.path.removeprefix(f"{name}/"): stored for stored in objects}
    folders = {path[:end] for path in files for end, letter in enumerate(path) if letter == "/"}
    # Tools mark a folder by an empty object; the library removes the slash at the end of its key.
    for path in [path for path, stored in files.items() if not stored.size]:
        if path in folders or is_version(path):
            folders.add(path)
            del files[path]
    fingerprint: set[tuple[str, int, int]] = {(f"{root}/{folder}", 0, 0) for folder in folders}
    fingerprint.update(
        (f"{root}/{path}", int(stored.identity, 16), stored.size) for path, stored in files.items()
    )
    error = _find_error(root, files, folders)
    return ListedModel(repository, name, files, frozenset(folders), frozenset(fingerprint), error)


def _find_error(
    root: str, files: Mapping[str, StoredObject], folders: Collection[str]
) -> HostError | None:
    """Why the objects cannot be files of a directory."""
    if len(root.rpartition("/")[2].encode()) > _MAX_NAME_BYTES:
        return invalid_argument(f"'{root}' has a longer name than a folder can have")
    for path, stored in files.items():
        if stored.size == UNLISTED:
            return unavailable(
                f"failed to list '{root}': no file can be named '{stored.path}'; rename this object"
            )
        if path in folders:
            return invalid_argument(
                f"'{root}/{path}' is both an object and a folder of other objects; remove one"
            )
        segments = path.split("/")
        if any(len(segment.encode()) > _MAX_NAME_BYTES for segment in segments):
            return invalid_argument(f"'{root}/{path}' has a longer name than a file can have")
    return None


def _is_config(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return path == "config.pbtxt" or (folder == "configs" and name.endswith(".pbtxt"))
