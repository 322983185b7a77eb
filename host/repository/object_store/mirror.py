"""A repository in an object store as folders: what the store lists, and the models in the cache."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from host.config.defaults import is_version
from host.errors import HostError, internal, invalid_argument, unavailable
from host.logs.formats import model_fields
from host.repository.fingerprint import Fingerprint
from host.repository.model_directory import ModelDirectory
from host.repository.object_store.cache import Lease, ModelCache, RepositoryCache
from host.repository.object_store.client import StoreProcess
from host.repository.object_store.listed_model import ListedModel, group_by_model
from host.repository.object_store.stored_object import NEW, ObjectChanged, StoredObject
from host.system.event_loop import run_all, run_in_thread
from host.system.files import PrivateDirectory
from host.system.resources import format_bytes

Reads = Callable[[str, int], bool]
"""Whether the content of a file is needed, by its path in the model and its size."""

_log = logging.getLogger("pbhost")

_REPORT_SECONDS = 10.0
_MAX_CONFIG_BYTES = 16 << 20
_LISTINGS = 16  # of models, at the same time
_TRIES_OF_CHANGED = 3
_REPLACED_SECONDS = 600.0  # no load reads a stand-in that was replaced before


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


@dataclass(slots=True)
class Transfer:
    """The fetch of one model in progress."""

    model: str
    total: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        text = f"{format_bytes(self.done)} of {format_bytes(self.total)}"
        if self.done:
            rate = self.done / max(1e-3, time.monotonic() - self.began)
            left = (self.total - self.done) / rate
            text += f", {format_bytes(round(rate))}/s, {left:.0f} s left"
        return text


@dataclass(eq=False, slots=True)
class _Listing:
    """A listing in progress; `name`: of one model, or "".

    What listings that began later have found is not replaced: `newer` are their models, and
    `outdated` tells that one of them was of all models.
    """

    name: str
    newer: set[str] = field(default_factory=set)
    outdated: bool = False


class StoreMirror:
    """A repository in an object store. Belongs to the event loop; folders are read in threads.

    Until a model is fetched, its directory is a stand-in, which has the names of all files, and the
    content of configuration files.
    """

    def __init__(
        self,
        url: str,
        process: StoreProcess,
        cache: RepositoryCache,
        stall_seconds: float,
    ) -> None:
        self.text = url
        self.counts = MirrorCounts()
        self.transfers: dict[str, Transfer] = {}
        self._process = process
        self._cache = cache
        self._stand_ins: PrivateDirectory | None = None
        self._stand_ins_lock = threading.Lock()
        self._stall_seconds = stall_seconds
        self._models: dict[str, ListedModel] = {}
        self._error: HostError | None = None  # of the last listing of all models
        self._name_error: HostError | None = None  # of the last one of a model that is not known
        self._ignored: set[str] = set()
        self._listings: list[_Listing] = []  # in progress, the oldest first
        self._replaced: deque[tuple[float, Path]] = deque()  # stand-ins that a load may still read

    # What was listed last

    def check(self) -> None:
        """Raises the error of the last listing of all models, or of one that is not known."""
        error = self._error or self._name_error
        if error is not None:
            raise error

    def models(self) -> list[ModelDirectory]:
        """The models, sorted by name. Raises HostError if they could not be listed."""
        if self._error is not None:
            raise self._error
        return [_directory(model) for _, model in sorted(self._models.items())]

    def find(self, name: str) -> ModelDirectory | None:
        """The model of this name, if the repository has one."""
        model = self._models.get(name)
        return None if model is None else _directory(model)

    async def disconnect(self) -> None:
        """Ends the process that reads the store; what was listed stays."""
        await self._process.close()

    async def close(self) -> None:
        """Removes the stand-ins, and ends the process that reads the store."""
        await self.disconnect()
        await asyncio.to_thread(self.remove_stand_ins)

    def remove_stand_ins(self) -> None:
        """Removes the directories of models that were not fetched. Blocks."""
        with self._stand_ins_lock:
            if self._stand_ins is not None:
                self._stand_ins.close()
                self._stand_ins = None

    def describe_fetch(self, name: str) -> str:
        """How far the fetch of a model is, "" if there is none."""
        transfer = self.transfers.get(name)
        return "" if transfer is None else f"fetching {transfer} from {self.text}"

    # Listing

    async def refresh(self, name: str = "") -> None:
        """Lists all models, or one, and prepares their stand-ins. Keeps errors for later."""
        listing = _Listing(name)
        self._listings.append(listing)
        try:
            await self._refresh(listing)
        finally:
            self._listings.remove(listing)

    async def _refresh(self, listing: _Listing) -> None:
        name, began = listing.name, time.monotonic()
        try:
            found = await self._list(name)
        except HostError as error:
            self.counts.failures += 1
            old = self._models.get(name)
            if listing.outdated or name in listing.newer:
                return
            if old is not None:
                self._models[name] = replace(old, error=error)
            elif name:
                self._name_error = error
            else:
                self._error = error
            return
        finally:
            self.counts.listings += 1
            self.counts.listing_seconds += time.monotonic() - began
        if not name and any(stored.path == "config.pbtxt" for stored in found):
            parent = self.text.rpartition("/")[0]
            self._error = invalid_argument(
                f"'{self.text}' is a model, expected a model repository: '{parent}'"
            )
            return
        listed, ignored = await asyncio.to_thread(group_by_model, self.text, found)
        if name:
            listed = {one: model for one, model in listed.items() if one == name}
        prepared = await self._prepare(listed)
        self._name_error = None
        for path in sorted(ignored.keys() - self._ignored):
            _log.warning("ignore %r, %s", f"{self.text}/{path}", ignored[path])
        if name:
            self._ignored |= ignored.keys()
        else:
            self._error = None
            self._ignored = set(ignored)
        await asyncio.to_thread(self._remove_replaced, self._publish(listing, prepared))

    def _publish(self, listing: _Listing, prepared: Mapping[str, ListedModel]) -> list[Path]:
        """Replaces models by newer ones; returns the stand-ins that no load reads any more."""
        models = dict(self._models)  # threads read the other one meanwhile
        names = {listing.name} if listing.name else models.keys() | prepared.keys()
        for name in () if listing.outdated else names - listing.newer:
            old, new = models.pop(name, None), prepared.get(name)
            if new is not None:
                models[name] = new
            directory = None if old is None else old.directory
            if directory is not None and (new is None or new.directory != directory):
                self._replaced.append((time.monotonic(), directory))
        self._models = models
        for older in self._listings[: self._listings.index(listing)]:
            older.newer.add(listing.name)
            older.outdated = older.outdated or not listing.name
        used = {model.directory for model in self._models.values()}
        removable = []
        while self._replaced and time.monotonic() - self._replaced[0][0] > _REPLACED_SECONDS:
            removable.append(self._replaced.popleft()[1])
        readable = used | {directory for _, directory in self._replaced}
        removable += [
            model.directory for model in prepared.values() if model.directory is not None
        ]  # of a listing that is outdated
        return [directory for directory in removable if directory not in readable]

    async def _list(self, name: str) -> list[StoredObject]:
        try:
            async for reply in self._process.send(self.text, self._stall_seconds, name):
                if reply.objects is not None:
                    return reply.objects
        except OSError as error:
            raise unavailable(
                f"failed to list '{self.text}': cannot start the process that reads object"
                f" stores: {error.strerror or error}"
            ) from error
        raise AssertionError("the last reply has the listing")

    async def _prepare(self, listed: Mapping[str, ListedModel]) -> dict[str, ListedModel]:
        """Makes the stand-ins of models that have changed."""
        limit = asyncio.Semaphore(_LISTINGS)
        prepared = dict(listed)

        async def prepare(name: str, model: ListedModel) -> None:
            known = self._models.get(name)
            if model.error is not None:
                return
            if known and known.directory is not None and known.listed == model.listed:
                prepared[name] = replace(known, error=None)
                return
            async with limit:
                try:
                    contents = await self._read_configs(model)
                    path = await asyncio.to_thread(self._write_stand_in, model, contents)
                except HostError as error:
                    self.counts.failures += 1
                    prepared[name] = replace(model, error=error)
                except OSError as error:
                    self.counts.failures += 1
                    text = f"failed to prepare '{model.root}': {error}"
                    prepared[name] = replace(model, error=internal(text))
                else:
                    prepared[name] = replace(model, directory=path)

        await run_all(prepare(name, model) for name, model in listed.items())
        return prepared

    async def _read_configs(self, model: ListedModel) -> dict[str, bytes]:
        """The contents of the configuration files, from the cache if they are there."""
        folder = self._cache.model(self.text, model.name)
        contents = {}
        for path, stored in model.configs.items():
            if stored.size > _MAX_CONFIG_BYTES:
                raise invalid_argument(
                    f"'{model.root}/{path}' has {stored.size} bytes, too many for a"
                    " configuration file"
                )
            contents[path] = await self._read_small(folder, stored)
        return contents

    async def _read_small(self, folder: ModelCache, stored: StoredObject) -> bytes:
        path = folder.object_path(stored)
        content = await asyncio.to_thread(_read_complete, path, stored.size)
        if content is not None:
            self.counts.cached_objects += 1
            return content
        async for reply in self._process.send(self.text, self._stall_seconds, stored=stored):
            content = reply.content
        assert content is not None
        self.counts.fetched_objects += 1
        self.counts.fetched_bytes += stored.size

        def write() -> None:
            folder.create()
            folder.write(stored, content)

        try:
            await asyncio.to_thread(write)
        except (HostError, OSError) as error:  # a load that needs the file reads it again
            _log.warning("failed to keep '%s/%s' in the cache: %s", self.text, stored.path, error)
        return content

    def _write_stand_in(self, model: ListedModel, contents: Mapping[str, bytes]) -> Path:
        with self._stand_ins_lock:
            self._stand_ins = self._stand_ins or PrivateDirectory()
        directory = Path(tempfile.mkdtemp(dir=self._stand_ins.path)) / model.name
        try:
            for folder in ("", *model.folders):
                (directory / folder).mkdir(parents=True, exist_ok=True)
            for path in model.files:
                (directory / path).write_bytes(contents.get(path, b""))
        except OSError:
            shutil.rmtree(directory.parent, ignore_errors=True)
            raise
        return directory

    def _remove_replaced(self, directories: Iterable[Path]) -> None:
        for directory in directories:
            shutil.rmtree(directory.parent, ignore_errors=True)

    # Fetching

    async def fetch(
        self,
        model: ListedModel,
        versions: Collection[int] | None = None,
        reads: Reads | None = None,
    ) -> tuple[Lease, Fingerprint]:
        """A directory with the contents of these versions, or of all, and what is in it.

        `reads`: which contents are needed; other files are there without it. Only what the cache
        does not have is fetched. An object that has changed since is listed again: the fingerprint
        is that of the directory, whose lease the caller closes. Raises HostError.
        """
        for left in reversed(range(_TRIES_OF_CHANGED)):
            fingerprint = model.fingerprint
            try:
                return await self._fetch_listed(model, versions, reads), fingerprint
            except ObjectChanged as error:
                _log.warning("%s", error.message, extra=model_fields(model.name))
                await self.refresh(model.name)
                listed = self._models.get(model.name)
                if not left or listed is None or listed.configs != model.configs:
                    raise
                model = listed
        raise AssertionError("the last try returns or raises")

    async def _fetch_listed(
        self, model: ListedModel, versions: Collection[int] | None, reads: Reads | None
    ) -> Lease:
        name = model.name
        files = {
            path: stored
            for path, stored in model.files.items()
            if _is_needed(path.split("/", 1)[0], versions)
        }
        folders = [one for one in model.folders if _is_needed(one.split("/", 1)[0], versions)]
        unread = [path for path, one in files.items() if reads and not reads(path, one.size)]
        for path in unread:
            del files[path]
        snapshot = _snapshot_name(files, folders, unread)
        folder = self._cache.model(self.text, name)
        find = partial(folder.find, snapshot, name, files)
        assemble = partial(folder.assemble, snapshot, name, files, folders, unread)
        lease = await run_in_thread(find, _discard)
        if lease is not None:
            self.counts.cached_objects += len(files)
            return lease
        try:
            async with folder.lock(self._stall_seconds):
                lease = await run_in_thread(find, _discard)
                if lease is None:
                    await self._fetch_missing(name, folder, files)
                    lease = await run_in_thread(assemble, _discard)
                else:
                    self.counts.cached_objects += len(files)
                return lease
        except HostError:
            self.counts.failures += 1
            raise
        except OSError as error:
            self.counts.failures += 1
            raise internal(
                f"failed to write '{model.root}' to {folder.path}: {error.strerror or error}"
            ) from error

    async def _fetch_missing(
        self, name: str, folder: ModelCache, files: Mapping[str, StoredObject]
    ) -> None:
        wanted = {stored.identity: stored for stored in files.values()}
        missing = await run_in_thread(lambda: folder.find_missing(wanted))
        self.counts.cached_objects += len(wanted) - len(missing)
        if not missing:
            return
        total = sum(stored.size for stored in missing)
        await self._cache.make_room(total, folder, wanted.values(), self._stall_seconds)
        await self._fetch_objects(name, folder, missing, total)

    async def _fetch_objects(
        self, name: str, folder: ModelCache, missing: Collection[StoredObject], total: int
    ) -> None:
        transfer = self.transfers[name] = Transfer(name, total)
        reporter = asyncio.get_running_loop().create_task(self._report(transfer))
        began = time.monotonic()

        async def fetch(stored: StoredObject) -> None:
            # A cancelled fetch of the same object may still end in the other process.
            path = folder.object_path(stored)
            fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}{NEW}")
            url, seconds = self.text, self._stall_seconds
            async for reply in self._process.send(url, seconds, stored=stored, path=str(fresh)):
                transfer.done += reply.received
                self.counts.fetched_bytes += reply.received
            await run_in_thread(lambda: fresh.rename(path))
            self.counts.fetched_objects += 1

        try:
            await run_all(map(fetch, missing))
        finally:
            reporter.cancel()
            del self.transfers[name]
            seconds = time.monotonic() - began
            self.counts.fetch_seconds += seconds
        _log.log(
            logging.INFO if seconds >= 1.0 else logging.DEBUG,
            "fetched '%s' from '%s': %d objects, %s in %.1f s",
            name, self.text, len(missing), format_bytes(total), seconds,
            extra=model_fields(name),
        )  # fmt: skip

    async def _report(self, transfer: Transfer) -> None:
        """Logs the progress of a long fetch."""
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            _log.info(
                "fetching '%s' from '%s': %s", transfer.model, self.text, transfer,
                extra=model_fields(transfer.model),
            )  # fmt: skip


def _directory(model: ListedModel) -> ModelDirectory:
    """The stand-in: a directory that is complete except for most contents."""
    path = Path(os.devnull, model.name) if model.directory is None else model.directory
    return ModelDirectory(model.name, path, stored=model)


def _discard(lease: Lease | None) -> None:
    """Ends a use that has lost its user."""
    if lease is not None:
        lease.close()


def _is_needed(top: str, versions: Collection[int] | None) -> bool:
    """Whether what is below this name in a model belongs to one of the versions, or to all."""
    return versions is None or not is_version(top) or int(top) in versions


def _snapshot_name(
    files: Mapping[str, StoredObject], folders: Iterable[str], unread: Iterable[str]
) -> str:
    parts = sorted((path, stored.identity) for path, stored in files.items())
    whole = (parts, sorted(folders), sorted(unread))
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:32]


def _read_complete(path: Path, size: int) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content if len(content) == size else None
