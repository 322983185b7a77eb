"""Tensors, requests and responses: in memory and in shared memory of clients, and digests of them.

A client may change the bytes in its shared memory, or shrink the memory; a process that touches
memory that is gone is killed by SIGBUS. So they are objects that no library can use as a buffer.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from host.errors import HostError, invalid_argument, unsupported
from stub.wire.messages import TraceLink

if TYPE_CHECKING:
    import numpy.typing as npt

_LENGTH = struct.Struct("<I")

CHUNK_SIZE = 1 << 28
"""Maximum number of bytes copied at a time where not all are needed at once.

A client's memory can be larger than the machine's if it is sparse.
"""


class SharedMemoryBytes(ABC):
    """`bytes(self)` is a private copy; raises HostError INTERNAL if the memory is gone."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __bytes__(self) -> bytes: ...

    @abstractmethod
    def read_part(self, begin: int, size: int) -> bytes:
        """Copies a part, which must lie within. Raises HostError INTERNAL."""


def read_bytes(data: bytes | memoryview | SharedMemoryBytes) -> bytes | memoryview:
    """The bytes to read: a copy if they are in memory of a client. Raises HostError INTERNAL."""
    return data if isinstance(data, (bytes, memoryview)) else bytes(data)


def serialize_bytes(elements: Iterable[bytes]) -> bytes:
    """The data of a BYTES tensor: each element after its length in 4 little-endian bytes."""
    return b"".join([part for item in elements for part in (_LENGTH.pack(len(item)), item)])


def refuse_if_too_large(name: str, data: SharedMemoryBytes) -> None:
    """Raises HostError INVALID_ARG if the machine lacks memory for two copies of a tensor.

    One is the copy, the other lies in an arena. Linux would grant the memory and kill this process
    later.
    """
    size = len(data)
    if size > CHUNK_SIZE and 2 * size > _available():
        raise invalid_argument(
            f"tensor '{name}' has {size} bytes in shared memory, which have to be copied, and there"
            " is not enough memory for that"
        )


def _available() -> int:
    with open("/proc/meminfo", "rb") as report:
        (line,) = (line for line in report if line.startswith(b"MemAvailable:"))
    return 1024 * int(line.split()[1])


Parameter = bool | int | float | str
"""Value of a request or response parameter.

Source: docs/reference/grpc.md, "Parameters of ModelInferRequest".
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
    docs/reference/http.md, "Classification".
    """

    counts: dict[str, int]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    batched: bool = False


class RequestTrace:
    """The trace of a request. This base class records nothing."""

    __slots__ = ()

    @property
    def trace_id(self) -> str:
        """The id of the trace."""
        return ""

    @property
    def includes_tensors(self) -> bool:
        """Whether the trace includes the content of tensors."""
        return False

    def create_child(self) -> RequestTrace:
        """The trace of a request that is made for this one."""
        raise NotImplementedError

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
        raise NotImplementedError

    def headers_for_server(self) -> dict[str, str]:
        """The W3C trace context for another server that runs the request; {} without one."""
        raise NotImplementedError

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
    wants_empty_final: bool = False
    """Whether its stream tells the end of its responses, if no last response does."""
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

    Source: docs/reference/scheduling.md, "Identity of a sequence".
    """
    if len(text.encode(errors="surrogatepass")) > _LONGEST:
        raise unsupported("string correlation ID cannot be longer than 128 characters")
    return text


DIGEST_SIZE = 16
"""Length of a digest in bytes: long enough that two requests never share one by chance."""


def digest_request(request: InferRequest, context: Sequence[bytes] = ()) -> bytes:
    """Computes a digest of the inputs and of the names of the requested outputs.

    It depends on the name, data type, shape and bytes of every input, not on their order, and on
    each part of `context`. Raises HostError INTERNAL if memory of a client is gone.
    """
    digest = blake2b(digest_size=DIGEST_SIZE)
    for part in _parts(request, context):
        # The length comes first, so different parts never give the same bytes when joined.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts(request: InferRequest, context: Sequence[bytes]) -> Iterator[Buffer]:
    yield from context
    inputs = sorted(request.inputs, key=attrgetter("name"))
    yield str(len(inputs)).encode()
    for tensor in inputs:
        yield tensor.name.encode()
        yield tensor.datatype.encode()
        yield str(tensor.shape).encode()
        data = read_bytes(tensor.data)
        yield data if isinstance(data, bytes) else data.cast("B")
    for name in sorted(request.requested_outputs):
        yield name.encode()


@dataclass(frozen=True)
class Result:
    """Outputs by name, as arrays with memory of their own, and the parameters of the response."""

    model_name: str
    model_version: int
    id: str
    outputs: dict[str, npt.NDArray[Any]]
    parameters: dict[str, Parameter]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The output with this name. Raises KeyError."""
        try:
            return self.outputs[name]
        except KeyError:
            there = ", ".join(self.outputs) or "none"
            raise KeyError(
                f"the response of model '{self.model_name}' has no output '{name}'; it has {there}"
            ) from None
