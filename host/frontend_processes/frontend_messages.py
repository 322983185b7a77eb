"""Messages between the core and a frontend process, with their errors, and their encoding.

A frame is a list of messages. Numbers are chosen by the frontend process; each is used once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import msgspec

from host.errors import ErrorCode, HostError, TooManyRequests
from host.inference.request import Parameter
from host.models.registry import NotServedError
from stub.wire.messages import BlockRelease, CloseArena, Message, make_decoder


class WireTensor(msgspec.Struct, array_like=True, gc=False):
    """A tensor: its bytes inline in `data`, a block `(arena, offset, size)`, or a part of a region.

    A part of client-registered shared memory is `(region, offset, size)`. Sizes are in bytes.
    """

    name: str
    datatype: str
    shape: list[int]
    data: bytes | None = None
    arena: int = 0
    offset: int = 0
    size: int = 0
    region: str | None = None


class WireError(msgspec.Struct, array_like=True, gc=False):
    """An error: the value of its `ErrorCode`, and the text.

    `not_served`: it is a NotServedError. `retry_after`: the seconds of a TooManyRequests, or 0.
    """

    code: str
    message: str
    not_served: bool = False
    retry_after: float = 0.0


class WireTrace(msgspec.Struct, array_like=True):
    """What a frontend knows of the trace of a request: the client's headers, and events (name, ns).

    The core decides whether the request is traced.
    """

    number: int
    model: str
    headers: dict[str, str]
    events: list[tuple[str, int]]


class WireResponse(msgspec.Struct, array_like=True):
    """An inference response; with an `error` there are no outputs."""

    model: str
    version: int
    id: str
    outputs: list[WireTensor]
    parameters: dict[str, Parameter]
    error: WireError | None = None


# Frontend to core


class Hello(Message, tag="hello"):
    """The first message: the process accepts connections.

    `unrestricted`: the rights that it still has, because the kernel does not support the limits.
    """

    unrestricted: list[str] = []


class Infer(Message, tag="infer"):
    """Starts a request; the fields are those of `InferRequest`.

    `classes`: the number of classes by output, of a classification. `placement`: outputs that the
    client wants in its shared memory, as (region, offset, size). `reserved`: the process counts the
    memory of the request until `RequestTaken`. `confirm`: the core sends `RequestAccepted` before
    the first response. `authorization`: the header of the client, if clients need keys.
    `admission`: the number of the `AwaitModel` that has counted the request already. `template`:
    the number by which `RepeatedInfer` refers to this request; 0 for none.
    """

    number: int
    model: str
    inputs: list[WireTensor]
    version: int = -1
    id: str = ""
    outputs: list[str] = []
    unary: bool = False
    parameters: dict[str, Parameter] = {}
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    classes: dict[str, int] | None = None
    placement: dict[str, tuple[str, int, int]] | None = None
    trace: WireTrace | None = None
    reserved: bool = False
    confirm: bool = False
    authorization: bytes = b""
    admission: int = 0
    template: int = 0


class RepeatedInfer(Message, tag="again"):
    """Starts a request that differs from an earlier `Infer` only in its id and tensor contents.

    `template`: that of the `Infer`. `contents`: for each input, its bytes, or the offset of its
    block in the arena of the process; the sizes are those of the template. The other fields are
    those of `Infer`.
    """

    number: int
    template: int
    contents: list[bytes | int]
    id: str = ""
    reserved: bool = False
    authorization: bytes = b""
    admission: int = 0


class CancelInfer(Message, tag="cancel"):
    """Cancels a request: its client waits no longer. The core may have responded already."""

    number: int


class ResponseAck(Message, tag="ack"):
    """The client has taken a response that was not the last one."""

    number: int


class FinishTrace(Message, tag="trace"):
    """The frontend has finished a traced request; `started`: it has sent `Infer` with this trace.

    The events are those since then.
    """

    trace: WireTrace
    started: bool


class FindModel(Message, tag="find"):
    """Asks for the configuration of a model; the core replies at once."""

    number: int
    model: str
    version: int


class AwaitModel(Message, tag="await"):
    """Waits until a model is loaded, as `Core.start_when_loaded`; `authorization` as in `Infer`.

    If clients need keys, the core counts the request from now on, until an `Infer` with this
    admission ends, or until `Cancel`.
    """

    number: int
    model: str
    version: int
    priority: int
    timeout_us: int
    authorization: bytes = b""


class Authorize(Message, tag="key"):
    """Asks whether a client may send inference requests to a model; the core replies at once.

    `authorization`: the header of the client. Any model is "".
    """

    number: int
    authorization: bytes
    model: str


class CallRpc(Message, tag="rpc"):
    """Calls a gRPC method that the core answers; `data` is the request message.

    `authorization`: the metadata of the client with this name.
    """

    number: int
    service: str
    method: str
    data: bytes
    authorization: str | None = None


class OpenExchange(Message, tag="http"):
    """An HTTP request that the core answers: the scope of ASGI, as far as it is used.

    `names`: the names of the headers as the client sent them.
    """

    number: int
    method: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    names: list[bytes] | None


class ExchangeBody(Message, tag="body"):
    """The reply to `ReceiveBody`: a part of the body. `disconnected`: the client has gone."""

    number: int
    body: bytes
    more: bool
    disconnected: bool = False


class ExchangeSent(Message, tag="sent"):
    """The reply to `SendHead` and `SendBody`: the connection takes more."""

    number: int


class Cancel(Message, tag="drop"):
    """Cancels what runs for `AwaitModel`, `CallRpc` or `OpenExchange`.

    After `AwaitModel`: no request starts with its admission.
    """

    number: int


class LogRecord(Message, tag="log"):
    """A record for the log of the server; `level` is that of `logging`."""

    level: int
    path: str
    line: int
    text: str


class Drained(Message, tag="drained"):
    """The reply to `Drain`: whether all requests were answered in time."""

    in_time: bool


class OpenRequestCounts(Message, tag="open"):
    """How many inference requests are open; sent each second while the process drains."""

    http: int
    grpc: int


class TlsReloaded(Message, tag="tls_done"):
    """New connections use the TLS files as they are now."""


class Pong(Message, tag="pong"):
    """The reply to `Ping`."""


# Core to frontend


class Start(Message, tag="start"):
    """The first message: the options of the server, by field.

    `needs_keys`: clients need API keys.
    """

    options: dict[str, Any]
    loads_on_demand: bool
    needs_keys: bool = False


class Response(Message, tag="response"):
    """A response to `Infer`; None is an end without one. `refused`: no model has the request."""

    number: int
    response: WireResponse | None
    final: bool = True
    refused: bool = False


class RequestAccepted(Message, tag="accepted"):
    """The request is valid for its model."""

    number: int


class RequestTaken(Message, tag="taken"):
    """A model has the request: it no longer waits."""

    number: int


class Reply(Message, tag="reply"):
    """The reply to `FindModel`, `AwaitModel`, `Authorize` or `CallRpc`."""

    number: int
    data: bytes
    error: WireError | None = None


class ReceiveBody(Message, tag="receive"):
    """Asks for the next part of a body."""

    number: int


class SendHead(Message, tag="head"):
    """Sends the head of an HTTP response."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]


class SendBody(Message, tag="chunk"):
    """Sends a part of the body of an HTTP response."""

    number: int
    body: bytes
    more: bool


class EndExchange(Message, tag="end"):
    """The core has finished with an HTTP request, completely or not."""

    number: int


class ReloadTls(Message, tag="tls"):
    """Reads the TLS files again; the process replies with `TlsReloaded`."""


class Drain(Message, tag="drain"):
    """Refuses new inference requests and waits for open ones, at most `seconds`."""

    seconds: float


class Stop(Message, tag="stop"):
    """Closes all connections, after at most `seconds` for what is still open, and ends."""

    seconds: float


class Ping(Message, tag="ping"):
    """Asks for a `Pong`."""


ToCore = Union[  # noqa: UP007 - a tagged union for msgspec
    BlockRelease,
    Hello,
    Infer,
    RepeatedInfer,
    CancelInfer,
    ResponseAck,
    FinishTrace,
    FindModel,
    AwaitModel,
    Authorize,
    CallRpc,
    OpenExchange,
    ExchangeBody,
    ExchangeSent,
    Cancel,
    LogRecord,
    Drained,
    OpenRequestCounts,
    TlsReloaded,
    Pong,
]
ToFrontend = Union[  # noqa: UP007
    BlockRelease,
    CloseArena,
    Start,
    Response,
    RequestAccepted,
    RequestTaken,
    Reply,
    ReceiveBody,
    SendHead,
    SendBody,
    EndExchange,
    ReloadTls,
    Drain,
    Stop,
    Ping,
]

decode_to_core: Callable[[bytes], list[ToCore]] = make_decoder(ToCore)
decode_to_frontend: Callable[[bytes], list[ToFrontend]] = make_decoder(ToFrontend)


def encode_error(error: HostError) -> WireError:
    """Converts an error."""
    retry_after = error.retry_after if isinstance(error, TooManyRequests) else 0.0
    return WireError(
        error.code.value, error.message, isinstance(error, NotServedError), retry_after
    )


def decode_error(wire: WireError) -> HostError:
    """Converts an error back. Raises ValueError for an unknown code."""
    if wire.retry_after:
        return TooManyRequests(wire.message, wire.retry_after)
    kind = NotServedError if wire.not_served else HostError
    return kind(ErrorCode(wire.code), wire.message)
