"""Messages between host and stub, and their one encoding.

A frame is a list of messages, so that what belongs together travels together. Type hints are in
the form that the oldest supported interpreter of an execution environment can evaluate.
"""

from typing import Dict, List, Optional, Sequence, Tuple, Union

import msgspec

Parameter = Union[bool, int, float, str]

INLINE_LIMIT = 2048
"""Tensors of at most this many bytes travel inside the message. A block in shared memory costs
two messages' worth of bookkeeping (allocate, return), which a copy of 2 kB does not."""


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


class WireError(msgspec.Struct, array_like=True, gc=False):
    """An error as data: the number of a `TritonError` code (pb_utils spec 3.11), and the text."""

    code: int
    message: str


class WireRequest(msgspec.Struct, array_like=True):
    """An inference request. No `outputs` means all that the model's configuration lists."""

    id: str
    inputs: List[WireTensor]
    outputs: List[str]
    parameters: Dict[str, Parameter]
    correlation_id: Union[int, str] = 0
    flags: int = 0
    timeout: int = 0
    model: str = ""
    version: int = -1


class WireResponse(msgspec.Struct, array_like=True):
    """An inference response; with an `error`, nothing else counts."""

    outputs: List[WireTensor]
    parameters: Dict[str, Parameter]
    error: Optional[WireError] = None


class _Message(msgspec.Struct, tag_field="t", array_like=True):
    """What every message shares: encoded as an array that starts with its tag."""


# Either way


class Return(_Message, tag="ret"):
    """The receiver's blocks that the sender no longer reads: (arena, offset, how many times)."""

    grants: List[Tuple[int, int, int]]


# Host to stub


class OpenArena(_Message, tag="open"):
    """Blocks of another process may follow: its file is at `path`; `limit` as for `Arena`."""

    arena: int
    path: str
    limit: int


class CloseArena(_Message, tag="close"):
    """That arena's process is gone, and nothing new will refer to it."""

    arena: int


class ModelSource(msgspec.Struct, array_like=True):
    """Where the model's code lies: `<directory>/<version>/<file>`."""

    directory: str
    version: int
    file: str


class Describe(_Message, tag="describe"):
    """Import the model and let it complete its configuration (`config`: JSON text)."""

    stub_name: str
    source: ModelSource
    config: str


class Initialize(_Message, tag="init"):
    """Become this instance: import if not done yet, construct, call `initialize(args)`."""

    instance_name: str
    source: ModelSource
    args: Dict[str, str]
    outputs: List[str]


class Execute(_Message, tag="exec"):
    """Run one batch."""

    batch: int
    requests: List[WireRequest]


class Answer(_Message, tag="answer"):
    """The response to an `Ask`."""

    number: int
    response: WireResponse


class Cancelled(_Message, tag="cancel"):
    """The caller of that request of that batch has lost interest."""

    batch: int
    index: int


class Finalize(_Message, tag="fini"):
    """Call `finalize`, say `Finalized`, leave."""


# Stub to host


class Hello(_Message, tag="hello"):
    """One of the stub's sockets is connected."""

    pid: int


class Described(_Message, tag="described"):
    """The completed configuration as JSON, or None if the model defines no completion."""

    config: Optional[str]


class Initialized(_Message, tag="ready"):
    """The instance takes batches from now on."""


class LoadFailed(_Message, tag="loadfail"):
    """Import, construction, completion or `initialize` failed with this text."""

    text: str


class Respond(_Message, tag="resp"):
    """One response to request `index` of `batch`."""

    batch: int
    index: int
    response: Optional[WireResponse]
    final: bool = True


class BatchDone(_Message, tag="done"):
    """`execute` has returned: the instance is free. Times are CLOCK_MONOTONIC nanoseconds.

    `failure` is the text that the log gets when the whole batch failed.
    """

    batch: int
    started: int
    inputs_ready: int
    outputs_begin: int
    ended: int
    failure: Optional[str] = None


class Ask(_Message, tag="ask"):
    """A model asks another one (BLS). `blocking`: the batch cannot go on before the answer."""

    number: int
    request: WireRequest
    batch: int
    blocking: bool


class LogLine(_Message, tag="log"):
    """A line of `pb_utils.Logger`, level as in pb_utils spec 3.12."""

    level: int
    file: str
    line: int
    text: str


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
    Finalize,
]
ToHost = Union[
    Return,
    Hello,
    Described,
    Initialized,
    LoadFailed,
    Respond,
    BatchDone,
    Ask,
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
