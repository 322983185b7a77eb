"""Tensors, requests and responses, and the trace of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from host.errors import HostError, unsupported
from host.inference.shared_memory_bytes import SharedMemoryBytes, refuse_if_too_large
from stub.wire.payload import TraceLink

Parameter = bool | int | float | str
"""Value of a request or response parameter.

Source: docs/reference/protocol.md, "Parameters of ModelInferRequest".
"""

Buffer = bytes | memoryview
"""Tensor bytes: little-endian, row-major, unpadded; BYTES elements are length-prefixed."""


class Tensor(msgspec.Struct):
    """A named tensor. `owner` keeps the memory of `data` valid.

    `datatype`: the protocol's name (`FP32`, `BYTES`, ...; docs/reference/protocol.md, "Data
    types"). `data` is empty for an output that was written to memory of its client.
    """

    name: str
    datatype: str
    shape: list[int]
    data: Buffer | SharedMemoryBytes
    owner: object = None


def copy_from_shared_memory(tensor: Tensor) -> Tensor:
    """Copies the tensor out of client-registered shared memory.

    Raises HostError INTERNAL if the memory is gone, INVALID_ARG if the machine lacks memory.
    """
    data = tensor.data
    if isinstance(data, (bytes, memoryview)) or not isinstance(data, SharedMemoryBytes):
        return tensor  # the first check is faster, as the second is of an abstract class
    refuse_if_too_large(tensor.name, data)
    return Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(data))


@dataclass(slots=True)
class Classification:
    """Outputs that are replaced by their top classes, and the number of classes of each.

    The core adds the names of classes by output, and whether the model batches. Source:
    docs/reference/protocol.md, "Classification".
    """

    counts: dict[str, int]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    batched: bool = False


class RequestTrace(Protocol):
    """The trace of a request."""

    @property
    def trace_id(self) -> str:
        """The id of the trace."""

    @property
    def includes_tensors(self) -> bool:
        """Whether the trace includes the content of tensors."""

    def create_child(self) -> RequestTrace:
        """The trace of a request that is made for this one."""

    def record_event(self, name: str, ns: int = 0) -> None:
        """Records an event in a frontend, at the current time unless another is given."""

    def finish_response(self) -> None:
        """Ends the trace in the frontend. A second call does nothing."""

    def start_inference(self, request: InferRequest, model: str, version: int, ns: int) -> None:
        """Records that the model takes the request, which was received at `ns`."""

    def reject_inference(self) -> None:
        """Records that the model refused the request after all."""

    def start_compute(self) -> TraceLink:
        """Records that an instance gets the request; returns the link that the instance may know.

        `finish_compute` follows.
        """

    def headers_for_server(self) -> dict[str, str]:
        """The W3C trace context for another server that runs the request; {} without one."""

    def finish_compute(self, times: ExecutionTimes | None) -> None:
        """Records the end of the batch; `times` is None if the stub died."""

    def record_response(self, response: InferResponse | None, final: bool) -> None:
        """Records a response; None is an end without a response."""


class RequestTracer(Protocol):
    """Decides which requests are traced."""

    def start_trace(self, model: str, header: Callable[[str], str | None]) -> RequestTrace | None:
        """Starts the trace of a request to a model; None if it is not traced.

        `header`: returns the value of a header of the client, by its lowercase name.
        """


class ExecutionTimes(msgspec.Struct):
    """The times of a batch: CLOCK_MONOTONIC nanoseconds."""

    started: int
    inputs_ready: int
    outputs_begin: int
    ended: int


class RequestShape:
    """What requests have in common that differ only in id, sequence, and content of tensors.

    Those who recognise such requests keep one for each kind that recurs: a message of gRPC, the
    JSON part of HTTP, a step of an ensemble, a template of a frontend process. The tensors of equal
    name have equal sizes. `accepted_by`: the signature that has validated such a request last, with
    the resulting `batch_size`; a model that is loaded again has another signature.
    """

    __slots__ = ("accepted_by", "batch_size")

    def __init__(self) -> None:
        self.accepted_by: object = None
        self.batch_size = 1


class InferRequest(msgspec.Struct):
    """One inference request, as a frontend passes it to the core.

    `model_version`: -1 is the latest ready one. `requested_outputs`: empty means all. `timeout_us`:
    microseconds, 0 for none. `flags`: 1 sequence start, 2 sequence end.
    """

    model_name: str
    inputs: list[Tensor]
    model_version: int = -1
    id: str = ""
    requested_outputs: list[str] = msgspec.field(default_factory=list)
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    trace: RequestTrace | None = None
    output_placement: dict[str, object] | None = None
    """Outputs that are written to memory of the client: blocks by output name."""
    output_placement_hints: dict[str, object] | None = None
    """Outputs that may be written to memory of a client at once: blocks by output name."""
    classification: Classification | None = None
    max_outstanding_responses: int = 0
    """Responses that may be outstanding at once; 0: the default."""
    shape: RequestShape | None = None
    """What it has in common with other requests, None if it was not recognised as one of them."""
    reserved_memory: object = None
    """Counts the memory of the received message until the tensors are in shared memory."""
    ancestors: Sequence[str] = ()
    """Ids of the calls to models of other servers that this request was made for."""
    batch_size: int = 1  # set by validation: first dimension of the inputs of a batching model


class KnownShapes:
    """The shapes of recent requests of a model or of a step of an ensemble, by what they describe.

    A shape of a request that never recurs is soon dropped.
    """

    _MAX = 256

    def __init__(self) -> None:
        self._shapes: dict[object, RequestShape] = {}

    def find(self, request: InferRequest) -> RequestShape:
        """The shape of a request."""
        inputs = [(t.name, t.datatype, len(t.data), *t.shape) for t in request.inputs]
        key = (request.model_name, request.model_version, *request.requested_outputs, *inputs)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= self._MAX:
                del self._shapes[next(iter(self._shapes))]
            shape = self._shapes[key] = RequestShape()
        return shape


class InferResponse(msgspec.Struct):
    """One response. With an `error` there are no outputs."""

    model_name: str
    model_version: int
    id: str = ""
    outputs: list[Tensor] = msgspec.field(default_factory=list)
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    error: HostError | None = None
    cache_hit: object = None
    """The entry of the response cache that this is, for `repeat_cache_hit`; None if it is none."""


_LONGEST = 128  # bytes of UTF-8


def checked_correlation_text(text: str) -> str:
    """Returns `text` if it is a valid correlation id. Raises HostError UNSUPPORTED.

    Source: docs/reference/configuration-and-scheduling.md, "Identity of a sequence".
    """
    if len(text.encode(errors="surrogatepass")) > _LONGEST:
        raise unsupported("string correlation ID cannot be longer than 128 characters")
    return text
