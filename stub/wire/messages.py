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


class Return(_Message, tag="ret"):
    """The receiver's blocks that the sender no longer reads: (arena, offset, how many times)."""

    grants: List[Tuple[int, int, int]]


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


class Describe(_Message, tag="describe"):
    """Import the model and let it complete its configuration (`config`: JSON text)."""

    source: ModelSource
    config: str


class Initialize(_Message, tag="init"):
    """Become this instance: import if not done yet, construct, call `initialize(args)`.

    `overlap` is how many batches an `async def execute` may work on at a time; `window` how many
    responses to one request may be under way, and `send_seconds` how long the next one waits. It is
    to run on the CPUs `cores`, if any, with memory of NUMA node `node`, if that is not None.
    """

    instance_name: str
    source: ModelSource
    args: Dict[str, str]
    outputs: List[str]
    decoupled: bool = False
    overlap: int = 1
    window: int = 128
    send_seconds: float = 60.0
    cores: Tuple[int, ...] = ()
    node: Optional[int] = None


class Execute(_Message, tag="exec"):
    """Run one batch."""

    batch: int
    requests: List[WireRequest]


class Answer(_Message, tag="answer"):
    """A response to an `Ask`; None for a last one that is only an end."""

    number: int
    response: Optional[WireResponse]
    final: bool = True


class Cancelled(_Message, tag="cancel"):
    """The caller of that request of that batch has lost interest."""

    batch: int
    index: int


class Taken(_Message, tag="taken"):
    """The caller of that request has taken so many of its responses: so many more may come."""

    batch: int
    index: int
    count: int


class Told(_Message, tag="told"):
    """The reply to any numbered message but an `Ask`: an error's text, or a value."""

    number: int
    error: Optional[str]
    value: Union[None, bool, int, float] = None


class CheckReady(_Message, tag="check"):
    """Call `is_ready`, say `Checked`."""

    number: int


class Finalize(_Message, tag="fini"):
    """Call `finalize`, say `Finalized`, leave."""


# Stub to host


class Hello(_Message, tag="hello"):
    """One of the stub's sockets is connected."""


class Described(_Message, tag="described"):
    """The completed configuration as JSON, or None if the model defines no completion."""

    config: Optional[str]


class Initialized(_Message, tag="ready"):
    """The instance takes batches from now on; `checks` whether it defines `is_ready`."""

    checks: bool = False


class LoadFailed(_Message, tag="loadfail"):
    """Import, construction, completion or `initialize` failed with this text."""

    text: str


class Respond(_Message, tag="resp"):
    """One response to request `index` of `batch`."""

    batch: int
    index: int
    response: Optional[WireResponse]
    final: bool = True


class Released(_Message, tag="free"):
    """`execute` goes on with this batch as a coroutine, and the instance is free."""

    batch: int


class BatchDone(_Message, tag="done"):
    """`execute` has returned: the instance is free. Times are CLOCK_MONOTONIC nanoseconds.

    A batch that everybody had left before it began is not run, and its times are 0.
    `failure` is the text that the log gets when the whole batch failed. Requests at the indexes
    `late` are answered later; those at `rescheduled` are to be queued again.
    """

    batch: int
    started: int
    inputs_ready: int
    outputs_begin: int
    ended: int
    failure: Optional[str] = None
    late: Tuple[int, ...] = ()
    rescheduled: Tuple[int, ...] = ()


class Ask(_Message, tag="ask"):
    """A model asks another one (BLS) on behalf of a batch, 0 if nobody knows of which.

    `blocking`: the batch's thread waits, and reads its answer as work. `decoupled`: any number of
    answers may come.
    """

    number: int
    request: WireRequest
    batch: int
    blocking: bool
    decoupled: bool = False


class Withdraw(_Message, tag="withdraw"):
    """Nobody wants the answers to this `Ask` any more."""

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


class IsModelReady(_Message, tag="isready"):
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
    """Change a value; `change` is increment, set or observe."""

    metric: int
    change: str
    value: float


class ReadMetric(_Message, tag="read"):
    """Tell a metric's value."""

    number: int
    metric: int


class DropMetrics(_Message, tag="drop"):
    """The model has let go of these."""

    families: List[int]
    metrics: List[int]


class Checked(_Message, tag="checked"):
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


class Finalized(_Message, tag="finid"):
    """`finalize` has returned, with this error text if it raised."""

    error: Optional[str]


ToStub = Union[
    Return,
    OpenArena,
    CloseArena,
    Describe,
    Initialize,
    Execute,
    Answer,
    Cancelled,
    Taken,
    Told,
    CheckReady,
    Finalize,
]
ToHost = Union[
    Return,
    Hello,
    Described,
    Initialized,
    LoadFailed,
    Respond,
    Released,
    BatchDone,
    Ask,
    Withdraw,
    LoadModel,
    UnloadModel,
    IsModelReady,
    NewMetricFamily,
    NewMetric,
    ChangeMetric,
    ReadMetric,
    DropMetrics,
    Checked,
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
