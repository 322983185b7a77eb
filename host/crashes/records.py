"""The newest records of stubs that died, in memory and maybe in a directory."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import structs

from host.crashes.contents import RequestContent, read_contents
from host.crashes.record import CrashRecord
from host.crashes.tensors import CrashedRequest, CrashTensors
from host.errors import HostError, invalid_argument, not_found
from host.recording.folder import remove_recording

_log = logging.getLogger("pbhost")

_SUFFIX = ".json"
_FILE_NAME = re.compile(r"[0-9]{8}T[0-9]{12}-[0-9]+\.json")  # other files are left alone
_MAX_FILE_BYTES = 4 << 20  # a file that is larger was not written by this module


class CrashRecords:
    """The newest `limit` records.

    `directory`: where each of them is also a file of JSON, which only its owner can read; "" for
    nowhere. Older files are removed. The records of earlier servers are in the directory, and are
    read when this object is created. `tensor_bytes`: up to which the tensors of the requests that
    ran are kept there with each record. Raises HostError INVALID_ARG if the directory cannot be
    used.
    """

    def __init__(self, limit: int, directory: str = "", tensor_bytes: int = 0) -> None:
        self._records: deque[CrashRecord] = deque(maxlen=limit)
        self._directory = Path(directory) if directory else None
        self._limit = limit
        self._tensor_bytes = tensor_bytes if limit else 0
        self._writes: set[asyncio.Future[None]] = set()
        if self._directory is not None:
            _prepare(self._directory)
            self._records.extend(read_records(self._directory, limit))

    @property
    def kept(self) -> int:
        """How many records are kept at most."""
        return self._limit

    def add(self, record: CrashRecord, requests: Sequence[CrashedRequest] = ()) -> None:
        """Adds a record with the requests that ran; its files are written beside the event loop."""
        tensors = CrashTensors(requests, self._tensor_bytes)
        record = structs.replace(record, recorded_requests=len(tensors.requests))
        self._records.append(record)
        if self._directory is not None and self._limit:
            loop = asyncio.get_running_loop()
            write = loop.run_in_executor(
                None, _write_record, self._directory, record, tensors, self._limit
            )
            self._writes.add(write)
            write.add_done_callback(self._on_written)

    def _on_written(self, write: asyncio.Future[None]) -> None:
        self._writes.discard(write)
        if not write.cancelled() and (error := write.exception()) is not None:
            _log.error("cannot keep the record of a crash in '%s': %s", self._directory, error)

    def newest(self, model: str = "") -> list[CrashRecord]:
        """The records of a model, or of all models, the newest first."""
        return [record for record in reversed(self._records) if model in ("", record.model)]

    def find(self, identifier: str) -> CrashRecord:
        """One record. Raises HostError NOT_FOUND."""
        for record in self._records:
            if record.id == identifier:
                return record
        raise not_found(
            f"there is no record of a crash '{identifier}'; the server keeps the newest"
            f" {self._limit}"
        )

    async def read_requests(self, identifier: str) -> list[RequestContent]:
        """The requests of a record with their tensors, read beside the event loop.

        Raises HostError NOT_FOUND if there is no such record or if its tensors were not kept, and
        INVALID_ARG if their files are damaged.
        """
        record = self.find(identifier)
        # The text of a file in the directory is not trusted to be a name.
        named = _FILE_NAME.fullmatch(f"{record.id}{_SUFFIX}")
        if self._directory is None or not record.recorded_requests or not named:
            raise not_found(
                f"the tensors of crash '{identifier}' were not kept; a server keeps them with"
                " --crash-directory and --crash-tensor-byte-size"
            )
        await self.close()
        folder = tensor_folder(self._directory, record.id)
        return await asyncio.get_running_loop().run_in_executor(None, read_contents, folder)

    async def close(self) -> None:
        """Waits until the files are written."""
        while self._writes:
            await asyncio.wait(self._writes)


def _write_record(directory: Path, record: CrashRecord, tensors: CrashTensors, limit: int) -> None:
    """Writes the files of a record, and removes the oldest ones over the limit. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = directory / f".{record.id}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = tensor_folder(directory, record.id)
    try:
        if tensors.requests:
            tensors.write(folder)
        with open(os.open(partial, flags, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        partial.rename(directory / f"{record.id}{_SUFFIX}")
    except BaseException:  # whatever it was, no half of a file stays; raised again
        with suppress(FileNotFoundError):
            partial.unlink()
        remove_recording(folder)
        raise
    for path in _record_files(directory)[:-limit]:
        remove_recording(tensor_folder(directory, path.stem))
        with suppress(FileNotFoundError):  # another server with this directory was faster
            path.unlink()


def tensor_folder(directory: Path, identifier: str) -> Path:
    """Where the tensors of a record's requests are, as a recording."""
    return directory / f"{identifier}.requests"


def _record_files(directory: Path) -> list[Path]:
    """The files of records, the oldest first: an id begins with the time. Raises OSError."""
    return sorted(path for path in directory.iterdir() if _FILE_NAME.fullmatch(path.name))


def _prepare(directory: Path) -> None:
    """Creates the directory. Raises HostError INVALID_ARG if it cannot be used."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(directory, str(error.strerror)) from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(directory, "this user may not read and write there")


def _unusable(directory: Path, why: str) -> HostError:
    return invalid_argument(
        f"cannot keep records of crashes in '{directory}' (--crash-directory): {why}"
    )


def _read_file(path: Path) -> bytes:
    """The content of a file. Raises OSError, and ValueError if it was not written by a server."""
    # Without O_NONBLOCK, opening a pipe without a writer would block.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not an ordinary file")
        if state.st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        return file.read(_MAX_FILE_BYTES)


def read_records(directory: Path, limit: int | None = None) -> list[CrashRecord]:
    """The newest records of a directory, the oldest of them first; None is no limit.

    Files that cannot be read are left out with a warning. Raises HostError INVALID_ARG.
    """
    try:
        paths = _record_files(directory)
    except OSError as error:
        raise _unusable(directory, str(error.strerror)) from error
    records: list[CrashRecord] = []
    for path in paths[-limit:] if limit else paths if limit is None else []:
        try:
            records.append(msgspec.json.decode(_read_file(path), type=CrashRecord))
        except (OSError, ValueError) as error:
            _log.warning("the record of a crash '%s' cannot be read: %s", path, error)
    return records
