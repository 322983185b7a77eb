"""Messages between host and stub, and their one encoding.

A frame is a list of messages, so that what belongs together travels together. Type hints are in
the form that the oldest supported interpreter of an execution environment can evaluate.
"""

from typing import Dict, List, Optional, Sequence, Tuple, Union

import msgspec

from stub.wire.payload import WireRequest, WireResponse


class _Message(msgspec.Struct, tag_field="t", array_like=True):
    """What every message shares: encoded as an array that starts with its tag."""


# Either way


class BlockRelease(_Message, tag="release"):
    """The receiver's blocks that the sender no longer reads: (arena, offset, how many times)."""

    blocks: List[Tuple[int, int, int]]


# Host to stub


class OpenArena(_Message, tag="open"):
    """Blocks of another process may follow: its file is at `path`, `limit` as for `Arena`.

    A client's `region` starts at `offset` of its file, has `limit` bytes and may be written to.
    """

    arena: int
    path: str
    limit: int
    offset: int = 0
    region: bool = False


class CloseArena(_Message, tag="close"):
    """That arena's process is gone, and nothing new will refer to it."""

    arena: int


class ModelSource(msgspec.Struct, array_like=True):
    """Where the model's code lies: `<directory>/<version>/<file>`.

    With a `backend`, a folder, it is that Python-based backend's: `<backend>/<file>`. `settings`
    are those of the command line for it.
    """

    directory: str
    version: int
    file: str
    backend: str = ""
    settings: Dict[str, str] = {}


class AutoComplete(_Message, tag="complete"):
    """Import the model and let it complete its configuration (`config`: JSON text)."""

    source: ModelSource
    config: str


class Initialize(_Message, tag="init"):
    """Become this instance: import if not done yet, construct, call `initialize(args)`.

    `max_concurrent_batches` is how many batches an `async def execute` may work on at a time;
    `max_outstanding_responses` how many responses to one request may be under way, and
    `send_timeout` how many seconds the next one waits. It is to run on the CPUs `cpus`, if any,
    with memory of NUMA node `numa_node`, if that is not None.
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


class Execute(_Message, tag="exec"):
    """Run one batch."""

    batch: int
    requests: List[WireRequest]


class BlsResponse(_Message, tag="bls_response"):
    """A response to an `BlsRequest`; None for a last one that is only an end."""

    number: int
    response: Optional[WireResponse]
    final: bool = True


class CancelRequest(_Message, tag="cancel"):
    """The caller of that request of that batch has lost interest."""

    batch: int
    index: int


class ResponseAck(_Message, tag="ack"):
    """The caller of that request has taken so many of its responses: so many more may come."""

    batch: int
    index: int
    count: int


class HostReply(_Message, tag="reply"):
    """The reply to any numbered message but an `BlsRequest`: an error's text, or a value."""

    number: int
    error: Optional[str]
    value: Union[None, bool, int, float] = None


class CheckReady(_Message, tag="check_ready"):
    """Call `is_ready`, say `ReadinessResult`."""

    number: int


class Finalize(_Message, tag="finalize"):
    """Call `finalize`, say `Finalized`, leave."""


# Stub to host


class Hello(_Message, tag="hello"):
    """One of the stub's sockets is connected."""


class AutoCompleted(_Message, tag="completed"):
    """The completed configuration as JSON, or None if the model defines no completion."""

    config: Optional[str]


class Initialized(_Message, tag="initialized"):
    """The instance takes batches from now on; `defines_is_ready` whether it defines `is_ready`."""

    defines_is_ready: bool = False


class LoadFailed(_Message, tag="load_failed"):
    """Import, construction, completion or `initialize` failed with this text."""

    text: str


class Response(_Message, tag="response"):
    """One response to request `index` of `batch`."""

    batch: int
    index: int
    response: Optional[WireResponse]
    final: bool = True


class InstanceReleased(_Message, tag="released"):
    """`execute` goes on with this batch as a coroutine, and the instance is free."""

    batch: int


class BatchDone(_Message, tag="done"):
    """`execute` has returned: the instance is free. Times are CLOCK_MONOTONIC nanoseconds.

    A batch that everybody had left before it began is not run, and its times are 0.
    `failure` is the text that the log gets when the whole batch failed. Requests at the indexes
    `deferred` are answered later; those at `rescheduled` are to be queued again.
    """

    batch: int
    started: int
    inputs_ready: int
    outputs_begin: int
    ended: int
    failure: Optional[str] = None
    deferred: Tuple[int, ...] = ()
    rescheduled: Tuple[int, ...] = ()


class BlsRequest(_Message, tag="bls_request"):
    """A model asks another one (BLS) on behalf of a batch, 0 if nobody knows of which.

    `blocking`: the batch's thread waits, and reads its answer as work. `decoupled`: any number of
    answers may come.
    """

    number: int
    request: WireRequest
    batch: int
    blocking: bool
    decoupled: bool = False


class CancelBls(_Message, tag="cancel_bls"):
    """Nobody wants the answers to this `BlsRequest` any more."""

    number: int


class LoadModel(_Message, tag="load"):
    """Load a model; `config` and `files` (by their paths) override what is in the repository."""

    number: int
    name: str
    config: str
    files: Dict[str, bytes]


class UnloadModel(_Message, tag="unload"):
    """Begin to unload a model."""

    number: int
    name: str
    dependents: bool


class IsModelReady(_Message, tag="is_ready"):
    """Whether that version, "" for any, of a model is ready."""

    number: int
    name: str
    version: str


class NewMetricFamily(_Message, tag="family"):
    """Register a metric family under a number of the stub's own; kinds as in pb_utils 3.13."""

    number: int
    family: int
    name: str
    description: str
    kind: int


class NewMetric(_Message, tag="metric"):
    """A metric of a family, also under a number of the stub's own."""

    number: int
    metric: int
    family: int
    labels: Dict[str, str]
    buckets: Optional[List[float]]


class ChangeMetric(_Message, tag="change"):
    """Change a value; `operation` is increment, set or observe."""

    metric: int
    operation: str
    value: float


class ReadMetric(_Message, tag="read"):
    """Tell a metric's value."""

    number: int
    metric: int


class DropMetrics(_Message, tag="drop"):
    """The model has let go of these."""

    families: List[int]
    metrics: List[int]


class ReadinessResult(_Message, tag="readiness"):
    """What `is_ready` said, and why not."""

    number: int
    ready: bool
    reason: str


class LogLine(_Message, tag="log"):
    """A line of a model's, level as in pb_utils spec 3.12; 0 for the batch if none is known."""

    level: int
    file: str
    line: int
    text: str
    batch: int = 0


class Finalized(_Message, tag="finalized"):
    """`finalize` has returned, with this error text if it raised."""

    error: Optional[str]


ToStub = Union[
    BlockRelease,
    OpenArena,
    CloseArena,
    AutoComplete,
    Initialize,
    Execute,
    BlsResponse,
    CancelRequest,
    ResponseAck,
    HostReply,
    CheckReady,
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
    LogLine,
    Finalized,
]

_encoder = msgspec.msgpack.Encoder()
_to_stub = msgspec.msgpack.Decoder(List[ToStub])
_to_host = msgspec.msgpack.Decoder(List[ToHost])


def encode(messages: Sequence[Union[ToStub, ToHost]]) -> bytes:
    """One frame from messages."""
    return _encoder.encode(messages)


def decode_to_stub(frame: bytes) -> List[ToStub]:
    """The messages of a frame for a stub. Raises msgspec.DecodeError on anything else."""
    try:
        return _to_stub.decode(frame)
    except UnicodeDecodeError as error:  # msgspec lets it through
        raise msgspec.DecodeError(str(error)) from error


def decode_to_host(frame: bytes) -> List[ToHost]:
    """The messages of a frame for the host. Raises msgspec.DecodeError on anything else."""
    try:
        return _to_host.decode(frame)
    except UnicodeDecodeError as error:  # msgspec lets it through
        raise msgspec.DecodeError(str(error)) from error
