"""A recording of requests and responses: its format, and the folder that keeps it.

In a folder, the lines and the bytes are two files. In a stream, the bytes of a request's tensors
follow its line. Source: docs/reference/metrics.md, "Recordings".
"""

from __future__ import annotations

import errno
import io
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from host.errors import HostError, invalid_argument, not_found
from host.inference.request import Buffer, InferRequest, Parameter, Tensor, read_bytes
from pb_utils._datatypes import CODES, SIZES

FORMAT = "pbhost recording 1"
MAX_LINE_BYTES = 16 << 20
"""A line that is longer was not written by a server."""

_SEQUENCE_FLAGS = {"sequence_start": 1, "sequence_end": 2}
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class RecordedTensor(msgspec.Struct, frozen=True):
    """A tensor, whose `size` bytes begin at `offset` of all bytes of the recording."""

    name: str
    datatype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=1024)]
    offset: _Size
    size: _Size


class RecordedResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response. `left_out`: names of outputs in memory of the client. `error`: None for none."""

    outputs: list[RecordedTensor] = []
    left_out: list[str] = []
    parameters: dict[str, Parameter] = {}
    error: str | None = None


class RecordingHeader(msgspec.Struct, frozen=True, tag_field="kind", tag="recording"):
    """The first line. `started`: RFC 3339."""

    format: str
    started: str


class _Format(msgspec.Struct):
    format: str


class RecordedRequest(msgspec.Struct, frozen=True, tag_field="kind", tag="request"):
    """A request. `time`: seconds since the start of the recording; `seconds`: until its end.

    `version`: "" if the server chose it. `parameters` include those of the protocol, such as
    `sequence_id`. `responses`: None if they are not known, as its process died.
    """

    model: str
    version: str
    id: str
    time: float
    seconds: float
    decoupled: bool
    parameters: dict[str, Parameter]
    inputs: list[RecordedTensor]
    requested_outputs: list[str]
    responses: list[RecordedResponse] | None

    def tensors(self) -> Iterator[RecordedTensor]:
        """Its inputs, and the outputs of its responses, in the order of their bytes."""
        yield from self.inputs
        for response in self.responses or ():
            yield from response.outputs


class RecordingEnd(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """The last line. `seen`: requests of the model. `dropped`: chosen, but not recorded."""

    reason: str
    seen: int
    recorded: int
    dropped: int


Line: TypeAlias = RecordingHeader | RecordedRequest | RecordingEnd


def encode_line(line: Line) -> bytes:
    """Returns the line with its newline."""
    return msgspec.json.encode(line) + b"\n"


def decode_line(text: bytes) -> Line:
    """Reads a line. Raises HostError INVALID_ARG if it is damaged."""
    try:
        line: Line = msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_argument(f"a line of the recording is damaged: {error}") from error
    if isinstance(line, RecordedRequest):
        for tensor in line.tensors():
            _check_tensor(tensor)
    return line


def decode_header(text: bytes) -> RecordingHeader | None:
    """Reads the first line; None if it has no format, so that this is no recording.

    The header of another format may have other fields, so the format is read first. Raises
    HostError INVALID_ARG for another format, and for a damaged line.
    """
    try:
        found = msgspec.json.decode(text, type=_Format).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if found != FORMAT:
        raise invalid_argument(
            f"the recording has the format '{found}', expected '{FORMAT}': use the version of"
            " pbhost that recorded it"
        )
    header = decode_line(text)
    return header if isinstance(header, RecordingHeader) else None


def _check_tensor(tensor: RecordedTensor) -> None:
    """Raises HostError INVALID_ARG if the size does not fit the datatype and the shape."""
    known = tensor.datatype in CODES
    size = SIZES.get(tensor.datatype)
    if not known or (size is not None and math.prod(tensor.shape) * size != tensor.size):
        raise invalid_argument(
            f"the recording is damaged: tensor '{tensor.name}' {tensor.datatype} {tensor.shape} has"
            f" {tensor.size} bytes"
        )


class TensorPlacer:
    """Places tensors one after the other in the bytes of a recording."""

    def __init__(self) -> None:
        self.size = 0
        """The bytes of all tensors that were placed."""

    def place(self, tensors: Iterable[Tensor]) -> list[RecordedTensor]:
        """Describes tensors at their places, which their bytes must then take."""
        placed: list[RecordedTensor] = []
        for tensor in tensors:
            size = len(tensor.data)
            described = RecordedTensor(
                tensor.name, tensor.datatype, list(tensor.shape), self.size, size
            )
            placed.append(described)
            self.size += size
        return placed


def snapshot_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors as they are now: without a copy, unless a client may change their bytes.

    Raises HostError INTERNAL if memory of a client is gone.
    """
    return [
        Tensor(one.name, one.datatype, list(one.shape), _flat(read_bytes(one.data)), one.owner)
        for one in tensors
    ]


def _flat(data: Buffer) -> Buffer:
    return data if isinstance(data, bytes) else data.cast("B")


def to_valid_text(text: str) -> str:
    """The text with question marks for what JSON cannot carry: clients may send invalid UTF-8."""
    return text.encode("utf-8", "replace").decode()


def to_valid_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The parameters that JSON can carry; a number that it cannot carry is a text."""
    valid: dict[str, Parameter] = {}
    for name, value in parameters.items():
        if isinstance(value, str):
            value = to_valid_text(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        valid[to_valid_text(name)] = value
    return valid


def recorded_parameters(request: InferRequest) -> dict[str, Parameter]:
    """The parameters with which a client sends the request again."""
    parameters = dict(request.parameters)
    if request.correlation_id:
        parameters["sequence_id"] = request.correlation_id
        for name, flag in _SEQUENCE_FLAGS.items():
            parameters[name] = bool(request.flags & flag)
    if request.priority:
        parameters["priority"] = request.priority
    if request.timeout_us:
        parameters["timeout"] = request.timeout_us
    return to_valid_parameters(parameters)


def describe_request(
    request: InferRequest,
    inputs: Sequence[RecordedTensor],
    time: float,
    seconds: float,
    decoupled: bool,
    responses: Sequence[RecordedResponse] | None,
) -> RecordedRequest:
    """The line of a request; the other arguments are its fields."""
    return RecordedRequest(
        model=request.model_name,
        version="" if request.model_version < 0 else str(request.model_version),
        id=to_valid_text(request.id),
        time=round(time, 6),
        seconds=round(seconds, 6),
        decoupled=decoupled,
        parameters=recorded_parameters(request),
        inputs=list(inputs),
        requested_outputs=list(request.requested_outputs),
        responses=None if responses is None else list(responses),
    )


def damaged(why: str) -> HostError:
    """The error for a recording that cannot be read."""
    return invalid_argument(f"the recording is damaged: {why}")


LINES_NAME, TENSORS_NAME = "recording.jsonl", "tensors.bin"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A link of a stranger's recording could lead to a file of this user, which would be sent on.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RecordingWriter:
    """Writes a recording into a new or empty folder, which only its owner can read.

    The bytes of a request's tensors are written before its line, so that each line is complete.
    Its methods raise OSError.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lines = open(os.open(folder / LINES_NAME, _CREATE, 0o600), "wb")
        try:
            self._tensors = open(os.open(folder / TENSORS_NAME, _CREATE, 0o600), "wb")
        except OSError:
            self._lines.close()
            raise

    def write_bytes(self, data: Buffer) -> None:
        """Writes bytes of tensors of the next line."""
        self._tensors.write(data)

    def write_line(self, line: Line) -> None:
        """Writes a line after the bytes of its tensors."""
        self._tensors.flush()
        self._lines.write(encode_line(line))
        self._lines.flush()

    def close(self) -> None:
        """Closes the files."""
        try:
            self._tensors.close()
        finally:
            self._lines.close()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RecordingReader:
    """Reads a recording. Everything in it is checked, and nothing in it names a file.

    `header` is its first line, `end` its last one: None if the recording was interrupted.
    """

    header: RecordingHeader
    end: RecordingEnd | None = None

    def __init__(self, folder: Path) -> None:
        """Raises HostError NOT_FOUND or INVALID_ARG."""
        self._folder = folder
        self._lines = _open(folder / LINES_NAME)
        try:
            self._tensors = _open(folder / TENSORS_NAME)
        except HostError:
            self._lines.close()
            raise
        self._size = os.fstat(self._tensors.fileno()).st_size
        try:
            header = decode_header(self._read_text())
            if header is None:
                raise damaged("its first line is not that of a recording")
        except HostError:
            self.close()
            raise
        self.header = header

    def requests(self) -> Iterator[RecordedRequest]:
        """Its requests. Raises HostError INVALID_ARG for a damaged one."""
        while (line := self._next_line()) is not None:
            if isinstance(line, RecordedRequest):
                for tensor in line.tensors():
                    if tensor.offset + tensor.size > self._size:
                        raise damaged(f"tensor '{tensor.name}' ends after {TENSORS_NAME}")
                yield line
            elif isinstance(line, RecordingEnd):
                self.end = line

    def _next_line(self) -> Line | None:
        text = self._read_text()
        return decode_line(text) if text else None

    def _read_text(self) -> bytes:
        try:
            text = self._lines.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise damaged(f"{LINES_NAME} cannot be read: {error.strerror}") from error
        if len(text) > MAX_LINE_BYTES:
            raise damaged(f"a line has more than {MAX_LINE_BYTES} bytes")
        return text

    def read_tensor(self, tensor: RecordedTensor) -> bytes:
        """The bytes of a tensor; any thread may call. Raises HostError INVALID_ARG."""
        parts: list[bytes] = []
        offset, end = tensor.offset, tensor.offset + tensor.size
        while offset < end:
            try:
                part = os.pread(self._tensors.fileno(), min(end - offset, 1 << 30), offset)
            except OSError as error:
                raise damaged(f"{TENSORS_NAME} cannot be read: {error.strerror}") from error
            if not part:
                raise damaged(f"tensor '{tensor.name}' ends after {TENSORS_NAME}")
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Closes the files."""
        self._lines.close()
        self._tensors.close()

    def __enter__(self) -> RecordingReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def remove_recording(folder: Path) -> None:
    """Removes a recording if there is one; not a folder with other files. Raises OSError."""
    for name in (LINES_NAME, TENSORS_NAME):
        with suppress(FileNotFoundError, NotADirectoryError):
            (folder / name).unlink()
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
            raise


def _open(path: Path) -> io.BufferedReader:
    """Opens an ordinary file. Raises HostError NOT_FOUND or INVALID_ARG."""
    try:
        file = open(os.open(path, _READ), "rb")
    except OSError as error:
        raise not_found(
            f"no recording in '{path.parent}': {path.name}: {error.strerror}"
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise not_found(f"no recording in '{path.parent}': {path.name} is not an ordinary file")
    return file
