"""What the clients of `pbhost infer` have in common: the request, and tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from host.errors import internal
from pb_utils import InferenceResponse, Tensor, TritonError
from pb_utils._datatypes import NAMES, STORAGE
from stub.wire.datatypes import CODES, SIZES

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Inference:
    """A request. `version`: "" for the version that the server chooses. `outputs`: [] for all."""

    model: str
    version: str
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


class InferenceClient(Protocol):
    """Asks a running server. Its methods raise HostError."""

    def read_config(self, model: str, version: str) -> dict[str, Any]:
        """Returns the configuration of a model, as JSON has it."""

    def read_metadata(self, model: str, version: str) -> dict[str, Any]:
        """Returns the metadata of a model, as JSON has it."""

    def infer(self, request: Inference, decoupled: bool) -> Iterator[InferenceResponse]:
        """Sends a request and yields its responses, each with outputs or an error."""


def datatype_of(tensor: Tensor) -> str:
    """Returns the data type of a tensor by its name in the protocol."""
    return NAMES[tensor.triton_dtype()]


def content_of(tensor: Tensor) -> bytes:
    """Returns the content of a tensor in the binary form of the protocol."""
    return bytes(tensor._wire_data())


def received_tensor(name: str, datatype: str, shape: Sequence[int], content: bytes) -> Tensor:
    """Returns a received tensor. Raises HostError if its content does not fit its shape."""
    elements = int(np.prod(shape, dtype=np.int64))
    size = elements * SIZES.get(datatype, 0)
    if datatype not in CODES or (datatype in SIZES and size != len(content)):
        shown = f"{len(content)} bytes for {datatype} {list(shape)}"
        raise internal(f"the server sent an invalid output '{name}': {shown}")
    return Tensor._from_wire(name, CODES[datatype], list(shape), memoryview(content), None)


def tensor_of_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor:
    """Returns a tensor that was received as JSON values. Raises HostError."""
    try:
        if datatype == "BYTES":
            flat = np.array(values, dtype=np.object_).ravel()
            return Tensor(name, flat.reshape(shape))
        array = np.array(values, dtype=STORAGE[CODES[datatype]])
        return Tensor(name, array.reshape(shape))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise internal(f"the server sent an invalid output '{name}': {error}") from error


def response_of(
    outputs: Sequence[Tensor], parameters: Mapping[str, object], error: str = ""
) -> InferenceResponse:
    """Returns a response as a model would receive it."""
    failed = TritonError(error) if error else None
    return InferenceResponse._from_wire(list(outputs), failed, parameters)
