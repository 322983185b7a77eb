"""Messages between host and stub, with tensors, requests and responses, and their encoding.

A frame is a list of messages, so that related messages arrive together. The type hints must work
with the oldest Python of an execution environment, because msgspec evaluates them.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import msgspec

Parameter = Union[bool, int, float, str]

INLINE_ALWAYS = 1 << 11
"""Tensors of at most this many bytes are always inline in the message."""

INLINE_LIMIT = 1 << 16
"""Tensors of at most this many bytes are inline if the ring has room for many such messages.

A block in shared memory needs bookkeeping in two processes: allocate, export and release. Inline
tensors need none.
"""


class WireTensor(msgspec.Struct, array_like=True, gc=False):
    """A tensor: its bytes inline in `data`, or a block `(arena, offset, size)` in shared memory.

    `code` is Triton's data-type number; `size` is in bytes.
    """

    name: str
    code: int
    shape: List[int]
    data: Optional[bytes] = None
    arena: int = 0
    offset: int = 0
    size: int = 0


OutputPlacement = Tuple[int, int, int]
"""The place for an output in a client's region: (arena, offset, size in bytes)."""


class WireError(msgspec.Struct, array_like=True, gc=False):
    """An error: a text, and the number of a `TritonError` code.

    The numbers are in docs/reference/model-module.md, "Errors".
    """

    code: int
    message: str


class TraceLink(msgspec.Struct, array_like=True, gc=False):
    """The trace of a request: its number in the host, and its W3C headers as JSON."""

    number: int
    context: Optional[str] = None


class WireRequest(msgspec.Struct, array_like=True):
    """An inference request.

    Empty `outputs` mean all outputs of the model's configuration. Outputs in `output_placement` are
    written there if they fit. `max_outstanding_responses` limits the unacknowledged responses; 0
    means the limit of the instance.
    """

    id: str
    inputs: List[WireTensor]
    outputs: List[str]
    parameters: Dict[str, Parameter]
    correlation_id: Union[int, str] = 0
    flags: int = 0
    timeout: int = 0
    model: str = ""
    version: int = -1
    trace: Optional[TraceLink] = None
    output_placement: Optional[Dict[str, OutputPlacement]] = None
    max_outstanding_responses: int = 0


class WireResponse(msgspec.Struct, array_like=True):
    """An inference response; with an `error`, the other fields are not used."""

    outputs: List[WireTensor]
    parameters: Dict[str, Parameter]
    error: Optional[WireError] = None


class Message(msgspec.Struct, tag_field="t", array_like=True):
    """The base of all messages: encoded as an array that starts with the tag."""


# Both directions


class BlockRelease(Message, tag="release"):
    """Releases blocks of the receiver that the sender no longer reads: (arena, offset, count)."""

    blocks: List[Tuple[int, int, int]]


# Host to stub


class OpenArena(Message, tag="open"):
    """Announces an arena of another process: its file is at `path`, `limit` as for `Arena`.

    A client's `region` starts at `offset` of its file, has `limit` bytes, and is writable.
    """

    arena: int
    path: str
    limit: int
    offset: int = 0
    region: bool = False


class CloseArena(Message, tag="close"):
    """Closes an arena whose process has ended; no later message refers to it."""

    arena: int


class ModelSource(msgspec.Struct, array_like=True):
    """The path of the model's code: `<directory>/<version>/<file>`.

    With a `backend`, it is the code of that Python-based backend: `<backend>/<file>`. `settings`
    are the command line's settings for the backend.
    """

    directory: str
    version: int
    file: str
    backend: str = ""
    settings: Dict[str, str] = {}


class PreloadJob(msgspec.Struct):
    """What is prepared before instances are forked: the code, and the argument of `preload`."""

    source: ModelSource
    args: Dict[str, str]


class AutoComplete(Message, tag="complete"):
    """Imports the model and calls its `auto_complete_config` with `config`, a JSON text."""

    source: ModelSource
    config: str


class Initialize(Message, tag="init"):
    """Initializes the instance: imports and constructs the model, calls `initialize(args)`.

    `max_concurrent_batches` limits the batches that an `async def execute` works on concurrently.
    `max_outstanding_responses` limits the unacknowledged responses to one request; the next one
    waits up to `send_timeout` seconds. The process is bound to the CPUs `cpus`, if any, and its
    memory to NUMA node `numa_node`, unless that is None.
    """

    instance_name: str
    source: ModelSource
    args: Dict[str, str]
    outputs: List[str]
    decoupled: bool = False
    max_concurrent_batches: int = 1
    max_outstanding_responses: int = 128
    send_timeout: float = 60.0
    cpus: Tuple[int, ...] = ()
    numa_node: Optional[int] = None


class Execute(Message, tag="exec"):
    """Runs one batch.

    `reclaimable`: return it if it arrives while `execute` waits for a response. It is not set for
    coroutine functions.
    """

    batch: int
    requests: List[WireRequest]
    reclaimable: bool = False


class SequencesExpired(Message, tag="sequences_expired"):
    """Calls `sequences_expired`: these sequences have ended without an END.

    It is sent between batches, to the stub's main thread, and only if the model has the method.
    """

    correlation_ids: List[Union[int, str]]


class BlsResponse(Message, tag="bls_response"):
    """A response to a `BlsRequest`; None for a final message without a response."""

    number: int
    response: Optional[WireResponse]
    final: bool = True


class CancelRequest(Message, tag="cancel"):
    """Cancels a request of a batch: its client no longer waits for it."""

    batch: int
    index: int


class ResponseAck(Message, tag="ack"):
    """Acknowledges `count` responses that the client of a request has received."""

    batch: int
    index: int
    count: int


class HostReply(Message, tag="reply"):
    """The reply to a numbered message other than `BlsRequest`: an error text, or a value."""

    number: int
    error: Optional[str]
    value: Union[None, bool, int, float] = None


class CheckReady(Message, tag="check_ready"):
    """Calls `is_ready`; the stub replies with `ReadinessResult`."""

    number: int


class DescribeStacks(Message, tag="describe_stacks"):
    """Asks for the Python stacks; the stub replies with `Stacks`."""

    number: int


class Finalize(Message, tag="finalize"):
    """Calls `finalize`; the stub replies with `Finalized` and exits.

    For coroutine functions it is sent to the service thread, as their event loop may be blocked.
    """


# Stub to host


class Hello(Message, tag="hello"):
    """The first message on each of the stub's sockets."""


class ModelWarning(Message, tag="warning"):
    """A warning about the files of the model, which the host logs once for all its instances."""

    text: str


class AutoCompleted(Message, tag="completed"):
    """The completed configuration as JSON; None if the model does not define completion."""

    config: Optional[str]


class Initialized(Message, tag="initialized"):
    """The instance accepts batches.

    `runs_coroutines`: whether the model has `async def execute`. The others: whether it has these
    methods.
    """

    defines_is_ready: bool = False
    runs_coroutines: bool = False
    defines_sequences_expired: bool = False


class LoadFailed(Message, tag="load_failed"):
    """An import, a construction, an auto-completion or `initialize` failed; `text` is the error."""

    text: str


class Response(Message, tag="response"):
    """One response to request `index` of `batch`."""

    batch: int
    index: int
    response: Optional[WireResponse]
    final: bool = True


class InstanceReleased(Message, tag="released"):
    """The instance is free for the next batch: `execute` continues this one as a coroutine."""

    batch: int


class BatchReturned(Message, tag="returned"):
    """The stub will not run this batch, which arrived while `execute` waits for another model."""

    batch: int


class BatchDone(Message, tag="done"):
    """The instance is free: `execute` has returned. Times are CLOCK_MONOTONIC nanoseconds.

    A batch whose requests were all cancelled before it began is not run; its times are 0. `failure`
    is the text for the log if the whole batch failed. `deferred` are the indexes of requests that
    get their responses later, `rescheduled` of those to queue again.
    """

    batch: int
    started: int
    inputs_ready: int
    outputs_begin: int
    ended: int
    failure: Optional[str] = None
    deferred: Tuple[int, ...] = ()
    rescheduled: Tuple[int, ...] = ()


class BlsRequest(Message, tag="bls_request"):
    """A request of a model to another model (BLS); `batch` is 0 if the batch is not known.

    `blocking`: the thread of the batch waits, and reads the response from the work queue.
    `decoupled`: any number of responses may arrive.
    """

    number: int
    request: WireRequest
    batch: int
    blocking: bool
    decoupled: bool = False


class CancelBls(Message, tag="cancel_bls"):
    """Cancels a `BlsRequest`: the model no longer waits for its responses."""

    number: int


class LoadModel(Message, tag="load"):
    """Loads a model; `config` and `files` (by path) override those of the repository.

    `hold`: the stub holds the model until it unloads it, or ends.
    """

    number: int
    name: str
    config: str
    files: Dict[str, bytes]
    hold: bool


class UnloadModel(Message, tag="unload"):
    """Starts to unload a model."""

    number: int
    name: str
    dependents: bool


class IsModelReady(Message, tag="is_ready"):
    """Queries whether a version of a model is ready; "" means any version."""

    number: int
    name: str
    version: str


class NewMetricFamily(Message, tag="family"):
    """Registers a metric family under a number chosen by the stub.

    For `kind` see docs/reference/model-module.md, "Metrics".
    """

    number: int
    family: int
    name: str
    description: str
    kind: int


class NewMetric(Message, tag="metric"):
    """Registers a metric of a family, also under a number chosen by the stub."""

    number: int
    metric: int
    family: int
    labels: Dict[str, str]
    buckets: Optional[List[float]]


class ChangeMetric(Message, tag="change"):
    """Changes a metric's value; `operation` is increment, set or observe."""

    metric: int
    operation: str
    value: float


class ReadMetric(Message, tag="read"):
    """Queries a metric's value."""

    number: int
    metric: int


class DropMetrics(Message, tag="drop"):
    """Releases families and metrics that the model has deleted."""

    families: List[int]
    metrics: List[int]


class ReadinessResult(Message, tag="readiness"):
    """The result of `is_ready`, and the reason if it is False."""

    number: int
    ready: bool
    reason: str


class Stacks(Message, tag="stacks"):
    """What the threads of the stub do, as lines of text."""

    number: int
    lines: List[str]


class ImportedFiles(Message, tag="imports"):
    """The files of the modules that the model has imported, without those of installed packages.

    For each one its absolute path, the time of its last change in nanoseconds since 1970, and its
    size in bytes. Both numbers are 0 if it was changed or deleted after the process started: then
    it is unknown what the model has imported.
    """

    files: List[Tuple[str, int, int]]


class LogLine(Message, tag="log"):
    """A log line of a model; `batch` is 0 if it is not known.

    For `level` see docs/reference/model-module.md, "Logger".
    """

    level: int
    file: str
    line: int
    text: str
    batch: int = 0


class Finalized(Message, tag="finalized"):
    """`finalize` has returned; `error` is the text of its exception, if any."""

    error: Optional[str]


ToStub = Union[
    BlockRelease,
    OpenArena,
    CloseArena,
    AutoComplete,
    Initialize,
    Execute,
    SequencesExpired,
    BlsResponse,
    CancelRequest,
    ResponseAck,
    HostReply,
    CheckReady,
    DescribeStacks,
    Finalize,
]
ToHost = Union[
    BlockRelease,
    Hello,
    AutoCompleted,
    Initialized,
    LoadFailed,
    Response,
    InstanceReleased,
    BatchReturned,
    BatchDone,
    BlsRequest,
    CancelBls,
    LoadModel,
    UnloadModel,
    IsModelReady,
    NewMetricFamily,
    NewMetric,
    ChangeMetric,
    ReadMetric,
    DropMetrics,
    ReadinessResult,
    Stacks,
    ImportedFiles,
    ModelWarning,
    LogLine,
    Finalized,
]

_encoder = msgspec.msgpack.Encoder()


encode: Callable[[Sequence[Message]], bytes] = _encoder.encode
"""Encodes messages as one frame."""

encode_message: Callable[[Message], bytes] = _encoder.encode
"""Encodes one message of a frame, for `join_messages`."""


def join_messages(messages: Sequence[bytes]) -> bytes:
    """Returns the frame of at most 65,535 encoded messages: a msgpack array."""
    count = len(messages)
    start = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
    return start + b"".join(messages)


def make_decoder(kinds: Any) -> Callable[[bytes], List[Any]]:
    """Returns the function that decodes frames of a union of messages.

    It raises msgspec.DecodeError if a frame is invalid.
    """
    decoder = msgspec.msgpack.Decoder(List[kinds])

    def decode(frame: bytes) -> List[Any]:
        try:
            return decoder.decode(frame)
        except UnicodeDecodeError as error:  # msgspec does not convert this error
            raise msgspec.DecodeError(str(error)) from error

    return decode


decode_to_stub: Callable[[bytes], List[ToStub]] = make_decoder(ToStub)
decode_to_host: Callable[[bytes], List[ToHost]] = make_decoder(ToHost)
