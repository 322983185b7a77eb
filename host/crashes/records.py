"""The newest records of stubs that died, in memory and maybe in a directory."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import structs

import pb_utils
from host.errors import HostError, invalid_argument, not_found
from host.inference.request import Buffer, InferRequest, Parameter, Tensor, read_bytes
from host.recording.recording import (
    FORMAT,
    RecordedRequest,
    RecordedTensor,
    RecordingEnd,
    RecordingHeader,
    RecordingReader,
    RecordingWriter,
    TensorPlacer,
    damaged,
    describe_request,
    remove_recording,
    snapshot_tensors,
    to_valid_text,
)
from pb_utils._datatypes import CODES
from pb_utils._text_form import format_tensor

_MAX_REQUESTS = 32
_FIRST_LINE_OF_STACKS = "Fatal Python error: "
_LINE_AFTER_STACKS = "Extension modules: "


Timestamp = Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]
"""A time in the form of RFC 3339, in UTC."""


class DescribedTensor(msgspec.Struct, frozen=True):
    """An input of a request: its name, datatype and shape, not its content."""

    name: str
    datatype: str
    shape: list[int]


class DescribedRequest(msgspec.Struct, frozen=True):
    """A request that runs, or ran when the stub died."""

    id: str
    inputs: list[DescribedTensor]


class CrashRecord(msgspec.Struct, frozen=True):
    """One death of a stub.

    `reason`: a sentence. `signal`: its name, "" if no signal ended the
    process; `status`: its exit status otherwise. `phase`: what the stub was doing. `requests`: the
    first of those that ran; `request_count` counts all of them. `stacks`: the Python stacks of all
    threads, empty if nothing could write them, as after SIGKILL. `output`: the last lines that the
    model printed or logged. `recorded_requests`: of how many requests the tensors are in the folder
    beside the record's file.
    """

    id: str
    time: Timestamp
    model: str
    version: int
    instance: str
    pid: int
    reason: str
    signal: str
    status: int | None
    phase: str
    request_count: int
    requests: list[DescribedRequest]
    stacks: list[str]
    output: list[str]
    recorded_requests: int = 0


class CrashSummary(msgspec.Struct, frozen=True):
    """What a list shows of a record; the fields are those of CrashRecord."""

    id: str
    time: Timestamp
    model: str
    version: int
    instance: str
    reason: str


def summarize(record: CrashRecord) -> CrashSummary:
    """What a list shows of a record."""
    return CrashSummary(
        record.id, record.time, record.model, record.version, record.instance, record.reason
    )


def format_time(moment: datetime) -> str:
    """A time with a time zone, as RFC 3339 in UTC with milliseconds."""
    utc = moment.astimezone(timezone.utc)
    return utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def describe_requests(requests: Iterable[InferRequest]) -> list[DescribedRequest]:
    """The first requests, without the content of their tensors."""
    described: list[DescribedRequest] = []
    for request in requests:
        if len(described) == _MAX_REQUESTS:
            break
        tensors = [DescribedTensor(t.name, t.datatype, list(t.shape)) for t in request.inputs]
        described.append(DescribedRequest(to_valid_text(request.id), tensors))
    return described


def find_stacks(output: list[str]) -> list[str]:
    """The lines that `faulthandler` wrote at a fatal signal; empty if it has not."""
    starts = [n for n, line in enumerate(output) if line.startswith(_FIRST_LINE_OF_STACKS)]
    if not starts:
        return []
    lines = output[starts[-1] :]
    ends = (n for n, line in enumerate(lines) if line.startswith(_LINE_AFTER_STACKS))
    lines = lines[: next(ends, len(lines))]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


_MAX_ELEMENT = 400  # characters or bytes of an element of BYTES
_MAX_TEXT = 8000  # characters of a tensor


class TensorContent(msgspec.Struct, frozen=True):
    """A tensor. `text`: its elements, abbreviated if there are many; `size` is in bytes."""

    name: str
    datatype: str
    shape: list[int]
    size: int
    text: str


class RequestContent(msgspec.Struct, frozen=True):
    """A request that ran when a stub died."""

    id: str
    parameters: dict[str, Parameter]
    inputs: list[TensorContent]


def read_contents(folder: Path) -> list[RequestContent]:
    """Reads the requests in a folder that `CrashTensors` wrote.

    Raises HostError NOT_FOUND, or INVALID_ARG if the folder is damaged.
    """
    with RecordingReader(folder) as reader:
        return [
            RequestContent(
                request.id,
                request.parameters,
                [_describe(tensor, reader.read_tensor(tensor)) for tensor in request.inputs],
            )
            for request in reader.requests()
        ]


def _describe(recorded: RecordedTensor, content: bytes) -> TensorContent:
    name, datatype, shape = recorded.name, recorded.datatype, list(recorded.shape)
    tensor = pb_utils.Tensor._from_wire(name, CODES[datatype], shape, memoryview(content), None)
    try:
        text = format_tensor(tensor, _MAX_ELEMENT)
    except (
        pb_utils.TritonModelException,
        ValueError,
        struct.error,
    ) as error:  # content or shape is wrong
        raise damaged(f"tensor '{name}': {error}") from error
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]} …"
    return TensorContent(name, datatype, shape, recorded.size, text)


class CrashedRequest(NamedTuple):
    """A request that ran when a stub died. `seconds`: since the server got it."""

    request: InferRequest
    decoupled: bool
    seconds: float


class CrashTensors:
    """The first requests whose tensors have at most `limit` bytes together.

    Their bytes are kept as they are now, without a copy unless a client may change them.
    """

    def __init__(self, requests: Iterable[CrashedRequest], limit: int) -> None:
        self.requests: list[RecordedRequest] = []
        self._contents: list[Buffer] = []
        placer = TensorPlacer()
        for crashed in requests if limit else ():
            request = crashed.request
            if placer.size + sum(len(tensor.data) for tensor in request.inputs) > limit:
                break
            try:
                tensors = snapshot_tensors(request.inputs)
            except HostError:  # the client took its memory away
                continue
            self._add(crashed, tensors, placer)

    def _add(self, crashed: CrashedRequest, tensors: list[Tensor], placer: TensorPlacer) -> None:
        request, decoupled, seconds = crashed
        placed = placer.place(tensors)
        self._contents += [read_bytes(tensor.data) for tensor in tensors]
        self.requests.append(describe_request(request, placed, 0.0, seconds, decoupled, None))

    def write(self, folder: Path) -> None:
        """Writes a recording. Raises OSError."""
        now = datetime.now(timezone.utc)
        count = len(self.requests)
        with RecordingWriter(folder) as writer:
            writer.write_line(RecordingHeader(FORMAT, now.isoformat(timespec="seconds")))
            for data in self._contents:
                writer.write_bytes(data)
            for request in self.requests:
                writer.write_line(request)
            writer.write_line(RecordingEnd("a process died", count, count, 0))


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

    def newest(self) -> list[CrashRecord]:
        """The records, the newest first."""
        return list(reversed(self._records))

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
