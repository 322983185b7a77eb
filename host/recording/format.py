"""The format of recordings: lines of JSON, and the bytes of tensors.

In a folder, the lines and the bytes are two files. In a stream, the bytes of a request's tensors
follow its line. Source: docs/reference/protocol.md, "Recordings".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from host.errors import HostError, invalid_argument
from host.inference.request import Buffer, InferRequest, Parameter, Tensor
from host.inference.shared_memory_bytes import read_bytes
from stub.wire.datatypes import CODES, SIZES

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
