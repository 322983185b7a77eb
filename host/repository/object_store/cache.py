"""The cache folder of repositories in object stores, which all servers of a machine may share.

    lock                         held while room is made, which one server does at a time
    <model>/lock                 held while its objects are fetched, linked or removed; its content:
                                 the bytes that the objects will have, if the holder fetches some
    <model>/objects/<identity>   the content of an object, complete
    <model>/<snapshot>.lock      held (shared) by servers that use the snapshot; its time is its use
    <model>/<snapshot>/<name>/   a model directory: links to objects

A process that ends releases its locks. What it leaves is complete, or has a name with `.new`.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from host.errors import HostError, internal, unavailable
from host.repository.object_store.stored_object import NEW, StoredObject
from host.system.event_loop import run_in_thread
from host.system.files import try_lock

_log = logging.getLogger("pbhost")

_LOCK_POLL_SECONDS = 0.05
_HEARTBEAT_SECONDS = 1.0
_BLOCK_BYTES = 512  # of `st_blocks`
_RESERVE = 100  # the share of the file system that is left free: one in so many bytes


class Lease:
    """The use of a model directory in the cache, which cannot be removed until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def keep(self) -> None:
        """Lets the use end with this process, even if it runs another program until then."""
        os.set_inheritable(self._lock, True)

    def close(self) -> None:
        """Ends the use."""
        with suppress(OSError):  # the folder may be gone; then nothing else uses it
            os.utime(self._lock)
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    folder: ModelCache
    name: str
    used: float


class ModelCache:
    """The folder of one model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.objects = path / "objects"

    def object_path(self, stored: StoredObject) -> Path:
        """Where the content of an object is, once it is complete."""
        return self.objects / stored.identity

    def create(self) -> None:
        """Creates the folder, which only this user can enter. Raises HostError."""
        root = self.path.parent
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (root, self.path, self.objects):
                folder.mkdir(mode=0o700, exist_ok=True)
            foreign = [folder for folder in (root, self.path) if _is_foreign(folder)]
        except OSError as error:
            raise _unusable(self.path, error) from error
        if foreign:
            raise internal(
                f"the cache of repositories at {foreign[0]} belongs to another user, who could"
                " replace models; choose another folder with --repository-cache-directory"
            )

    def write(self, stored: StoredObject, content: bytes) -> None:
        """Writes the content of a small object, also without the lock. Blocks. Raises OSError."""
        final = self.object_path(stored)
        file, fresh = tempfile.mkstemp(NEW, f"{final.name}.", self.objects)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(content)
                os.fchmod(file, 0o444)  # models of several servers may be links to it
            os.rename(fresh, final)
        except OSError:
            Path(fresh).unlink(missing_ok=True)
            raise

    @asynccontextmanager
    async def lock(self, stall_seconds: float) -> AsyncIterator[None]:
        """Held by the only server that changes the folder. Raises HostError UNAVAILABLE."""
        await asyncio.to_thread(self.create)
        async with _holding(self.path / "lock", stall_seconds):
            yield

    def reserve(self, needed: int) -> None:
        """Tells other servers how many bytes will be written; the caller holds both locks. Blocks.

        It counts for as long as the lock of the folder is held. Raises OSError.
        """
        (self.path / "lock").write_text(str(self.written() + needed))

    def pending(self) -> int:
        """The bytes that a server which fetches the model will write. Blocks. Raises OSError."""
        with suppress(FileNotFoundError):
            file = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not try_lock(file, fcntl.LOCK_SH):
                    return max(0, int(os.read(file, 20) or 0) - self.written())
            finally:
                os.close(file)
        return 0

    def written(self) -> int:
        """The bytes of all objects, as far as they have been written. Blocks."""
        total = 0
        for entry, status in _scan(self.objects):
            size = status.st_size
            if entry.name.endswith(NEW):
                # Of a file of which only the last part was written, it is that of the whole file.
                # The blocks of complete files may be fewer: some file systems compress them.
                size = min(size, status.st_blocks * _BLOCK_BYTES)
            total += size
        return total

    def find(self, snapshot: str, name: str, files: Mapping[str, StoredObject]) -> Lease | None:
        """The model directory of a snapshot, if it is complete. Blocks. Raises HostError."""
        directory = self.path / snapshot / name
        if not directory.is_dir():
            return None
        lock = self.path / f"{snapshot}.lock"
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self.path, error) from error
        complete = False
        try:
            complete = (
                try_lock(file, fcntl.LOCK_SH)
                and os.path.samestat(os.fstat(file), os.stat(lock))
                and all(_size(directory / path) == one.size for path, one in files.items())
            )
            if complete:
                os.utime(file)
                return Lease(directory, file)
        except FileNotFoundError:
            pass  # it was removed meanwhile
        finally:
            if not complete:
                os.close(file)
        return None

    def assemble(
        self,
        snapshot: str,
        name: str,
        files: Mapping[str, StoredObject],
        folders: Iterable[str],
        unread: Iterable[str],
    ) -> Lease:
        """Makes a model directory of objects that are complete; the caller holds the lock. Blocks.

        `unread`: files whose contents are not needed; they are empty. Raises HostError.
        """
        fresh, final = self.path / f"{snapshot}{NEW}", self.path / snapshot
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            for folder in ("", *folders):
                (fresh / name / folder).mkdir(parents=True, exist_ok=True)
            for path, stored in files.items():
                os.link(self.object_path(stored), fresh / name / path)
            for path in unread:
                (fresh / name / path).touch(0o444, exist_ok=False)
            shutil.rmtree(final, ignore_errors=True)  # one that has lost files
            fresh.rename(final)
        except FileExistsError as error:
            raise internal(
                f"two objects of model '{name}' are the same file in {self.path}:"
                f" {error.filename2 or error.filename}"
                " (its file system does not tell upper from lower case)"
            ) from error
        except OSError as error:
            raise _unusable(self.path, error) from error
        lease = self.find(snapshot, name, files)
        if lease is None:
            raise internal(f"{final} is incomplete, though it was just made: is the disk full?")
        return lease

    def find_missing(self, wanted: Mapping[str, StoredObject]) -> list[StoredObject]:
        """The objects, by identity, that have to be fetched, the largest first. Blocks.

        Empty ones are made. Raises OSError.
        """
        sizes = {entry.name: status.st_size for entry, status in _scan(self.objects)}
        missing = [one for identity, one in wanted.items() if sizes.get(identity) != one.size]
        for stored in missing:
            if not stored.size:
                self.write(stored, b"")
        return sorted((one for one in missing if one.size), key=lambda one: one.size, reverse=True)

    def snapshots(self) -> list[_Snapshot]:
        """All snapshots, with the time of their last use. Blocks."""
        found = []
        for entry in os.scandir(self.path):
            name = entry.name
            if entry.is_dir() and name != self.objects.name:
                used = 0.0  # of one that a killed server has not completed
                with suppress(OSError):
                    used = os.stat(self.path / f"{name}.lock").st_mtime
                found.append(_Snapshot(self, name, used))
        return found

    def remove(self, snapshot: str) -> None:
        """Removes a snapshot unless it is used; the caller holds the lock. Blocks."""
        lock = self.path / f"{snapshot}.lock"
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(file):
                shutil.rmtree(self.path / snapshot, ignore_errors=True)
                lock.unlink(missing_ok=True)
        finally:
            os.close(file)

    def remove_unlinked(self, keep: Iterable[StoredObject] = ()) -> int:
        """Removes objects of no snapshot; returns their bytes. The caller holds the lock."""
        kept = {stored.identity for stored in keep}
        freed = 0
        for entry, status in _scan(self.objects):
            if status.st_nlink == 1 and entry.name not in kept:
                Path(entry.path).unlink(missing_ok=True)
                freed += status.st_size
        return freed


class RepositoryCache:
    """The folder of all models. `limit`: the most bytes of objects in it; 0 is no limit."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self._limit = limit

    def model(self, url: str, name: str) -> ModelCache:
        """The folder of a model of a repository."""
        digest = hashlib.sha256(f"{url}\0{name}".encode()).hexdigest()[:16]
        return ModelCache(self.root / f"{digest}-{name[:100]}")

    async def make_room(
        self,
        needed: int,
        keep: ModelCache,
        kept: Collection[StoredObject],
        stall_seconds: float,
    ) -> None:
        """Reserves room for `needed` bytes; for it, removes what was not used for longest.

        The caller holds the lock of `keep`, and needs its objects `kept`. Raises HostError
        UNAVAILABLE if there is not enough, without what models need that others fetch, or OSError.
        """
        async with _holding(self.root / "lock", stall_seconds):
            await run_in_thread(lambda: self._remove_for(needed, keep, kept))
            await run_in_thread(lambda: keep.reserve(needed))

    def _remove_for(self, needed: int, keep: ModelCache, kept: Collection[StoredObject]) -> None:
        others = sum(folder.pending() for folder in self._folders() if folder.path != keep.path)
        lacking = self._lacking(needed + others)
        if lacking <= 0:
            return
        if lacking > self._used():
            raise self._no_room(needed, others)  # removing models would not help
        for folder in self._folders():  # what servers have left that were killed
            self._remove("", folder, keep, kept)
        lacking = self._lacking(needed + others)
        if lacking <= 0:
            return
        snapshots = [one for folder in self._folders() for one in folder.snapshots()]
        for snapshot in sorted(snapshots, key=lambda one: one.used):
            self._remove(snapshot.name, snapshot.folder, keep, kept)
            if self._lacking(needed + others) <= 0:
                return
        raise self._no_room(needed, others)

    def _no_room(self, needed: int, others: int) -> HostError:
        free = shutil.disk_usage(self.root).free
        limit = f" of the {self._limit} of --repository-cache-byte-size" if self._limit else ""
        more = f"; other models that are fetched now need {others}" if others else ""
        return unavailable(
            f"no room for {needed} bytes in {self.root}: {free} bytes are free, and the models in"
            f" it have {self._used()}{limit}{more}"
        )

    def _remove(
        self, snapshot: str, folder: ModelCache, keep: ModelCache, kept: Collection[StoredObject]
    ) -> None:
        """Removes a snapshot, if any, and objects of no snapshot."""
        if folder.path == keep.path:
            if snapshot:
                folder.remove(snapshot)
            folder.remove_unlinked(kept)
            return
        file = os.open(folder.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(file):
                if snapshot:
                    folder.remove(snapshot)
                folder.remove_unlinked()
        finally:
            os.close(file)

    def _lacking(self, needed: int) -> int:
        """How many bytes there are too few."""
        disk = shutil.disk_usage(self.root)
        lacking = needed + disk.total // _RESERVE - disk.free
        if self._limit:
            lacking = max(lacking, self._used() + needed - self._limit)
        return lacking

    def _used(self) -> int:
        return sum(folder.written() for folder in self._folders())

    def _folders(self) -> list[ModelCache]:
        found = (ModelCache(Path(entry.path)) for entry in os.scandir(self.root) if entry.is_dir())
        return [folder for folder in found if folder.objects.is_dir()]


@asynccontextmanager
async def _holding(lock: Path, stall_seconds: float) -> AsyncIterator[None]:
    """Held by one server at a time. Raises HostError UNAVAILABLE.

    Another server may hold it for long, but touches it all the time.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = await run_in_thread(lambda: os.open(lock, flags, 0o600), os.close)
    except OSError as error:
        raise _unusable(lock.parent, error) from error
    began = time.time()
    try:
        while not try_lock(file):
            # One that has just taken the lock may not have touched it yet.
            if time.time() - max(began, os.fstat(file).st_mtime) > 2 * stall_seconds:
                raise unavailable(
                    f"another server has held {lock} for {2 * stall_seconds:g} s"
                    " and does not respond"
                )
            await asyncio.sleep(_LOCK_POLL_SECONDS)
        heartbeat = asyncio.get_running_loop().create_task(_touch(lock, file))
        try:
            os.truncate(file, 0)  # what a killed server has reserved
            yield
        finally:
            heartbeat.cancel()
    finally:
        os.close(file)


async def _touch(lock: Path, file: int) -> None:
    """Tells servers that wait for the lock that this one runs."""
    while True:
        try:
            os.utime(file)
        except OSError as error:
            _log.warning("failed to touch %s: %s", lock, error.strerror)
        await asyncio.sleep(_HEARTBEAT_SECONDS)


def _scan(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """The entries of a folder, without those that another server removes meanwhile."""
    for entry in os.scandir(folder):
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue
        yield entry, status


def _is_foreign(folder: Path) -> bool:
    """Whether a user other than this one and root owns the folder. Raises OSError."""
    owner = folder.stat().st_uid
    if owner in (0, os.getuid()):
        return False
    # Some file systems on networks show another owner for everything that this user creates.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return os.stat(own).st_uid != owner


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1


def _unusable(path: Path, error: OSError) -> HostError:
    return internal(
        f"cannot use the cache of repositories at {path}: {error.strerror or error}; choose another"
        " folder with --repository-cache-directory"
    )
