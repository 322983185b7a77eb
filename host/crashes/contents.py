"""The tensors of the requests of a crash, as text for people."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from host.inference.request import Parameter
from host.recording.folder import RecordingReader
from host.recording.format import RecordedTensor, damaged
import pb_utils
from pb_utils._response_text import format_tensor
from stub.wire.datatypes import CODES

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
    except (pb_utils.TritonModelException, ValueError, struct.error) as error:  # content or shape is wrong
        raise damaged(f"tensor '{name}': {error}") from error
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]} …"
    return TensorContent(name, datatype, shape, recorded.size, text)
