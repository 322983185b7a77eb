"""The contract between the gRPC service and its engines: methods, handlers, options."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from host.errors import HostError, unavailable, unexpected_failure
from host.frontends.inference_core import Cancellable
from host.frontends.receive_memory import ReservedBytes
from host.frontends.request_headers import Header, Restrictions
from host.frontends.tls import TlsFiles

_log = logging.getLogger("pbhost")


class RpcContext(Protocol):
    """The context of an RPC."""

    def metadata(self, key: str) -> str | None:
        """The value of a metadata key (lowercase) of the client, None without one."""

    def invocation_metadata(self) -> Sequence[Header]:
        """All metadata of the client and its transport."""


class Metadata:
    """The context of an RPC with these fields of metadata."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Sequence[Header] = ()) -> None:
        self._fields = fields

    def metadata(self, key: str) -> str | None:
        """Returns the value of a key that is text."""
        for name, value in self.invocation_metadata():
            if name == key:
                return value if isinstance(value, str) else None
        return None

    def invocation_metadata(self) -> Sequence[Header]:
        """Returns all fields."""
        return self._fields


ResponseCallback = Callable[[bytes | HostError], None]
"""Called with the response message, or with the error."""


class StreamWriter(Protocol):
    """Writes to a stream; the engine implements it."""

    def write_message(self, message: bytes, more: bool) -> bool:
        """Sends a message; `more` may arrive soon. Whether the next one may be written at once:
        otherwise `resume_writing` is called when this one has left, or little enough waits.
        """

    def resume_reading(self) -> None:
        """Allows the next message, after `message_received` has returned False."""

    def finish_stream(self, error: Exception | None = None, retry: int | None = None) -> None:
        """Ends the stream, with an error if there is one. Nothing is called after that.

        `retry`: milliseconds after which the client may try again, for the trailing metadata.
        """


class StreamHandler(Protocol):
    """Serves one stream; the engine calls it directly, without tasks."""

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        """Handles a message; returns whether the next one may arrive before `resume_reading`.

        `reserved` is the memory of the message, if it is counted; the handler keeps it as long.
        """

    def half_closed(self) -> None:
        """Called when the client has sent its last message."""

    def resume_writing(self) -> None:
        """There is room again."""

    def cancel(self) -> None:
        """Called when the client has gone, or the engine has ended the stream."""


UnaryHandler = Callable[[bytes, RpcContext], Awaitable[bytes]]
StreamHandlerFactory = Callable[[StreamWriter, RpcContext], StreamHandler]


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """An RPC with one request and one response.

    The handler takes and returns message bytes, raises HostError, and is cancelled when the client
    has gone or its deadline has passed. `category`: what can be restricted. `callback_handler`:
    does the same without a coroutine, and calls its second argument once, maybe before it returns.
    Its last argument is the memory of the message, if it is counted; it is kept with the message.
    `places_tensors`: a message that arrived in pieces may be a PlacedMessage.
    """

    name: str
    handler: UnaryHandler
    category: str
    callback_handler: (
        Callable[[bytes, ResponseCallback, RpcContext, ReservedBytes | None], Cancellable] | None
    ) = None
    places_tensors: bool = False


@dataclass(frozen=True, slots=True)
class StreamMethod:
    """An RPC with messages in both directions. `open_stream` raises HostError.

    `places_tensors`: as in `UnaryMethod`.
    """

    name: str
    open_stream: StreamHandlerFactory
    category: str
    places_tensors: bool = False


INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"

Method = UnaryMethod | StreamMethod
Services = dict[str, list[Method]]
"""Methods of each service by its full name; the path of a method is `/{service}/{method}`."""


def to_host_error(error: BaseException) -> HostError:
    """The error for the client. A defect is logged with its traceback."""
    if isinstance(error, HostError):
        return error
    _log.error("unexpected failure of a gRPC handler", exc_info=error)
    return unexpected_failure(error)


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """Options of an engine. Times are in milliseconds; an age of 0 is no limit.

    `compression_level`: none, low, medium or high. `tls`: a file that cannot be read is treated as
    empty. Source: docs/reference/grpc.md, "Connections and options".
    """

    keepalive_time: int = 7200000
    keepalive_timeout: int = 20000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data: int = 300000
    http2_max_ping_strikes: int = 2
    max_connection_age: int = 0
    max_connection_age_grace: int = 0
    reuse_port: bool = False
    compression_level: str = "none"
    handshake_timeout: int = 20000
    tls: TlsFiles | None = None


def check_restriction(restrictions: Restrictions, category: str, context: RpcContext) -> None:
    """Raises HostError unless the client sent the metadata that the category requires."""
    lacking = restrictions.missing_header(category, context.metadata)
    if lacking is not None:
        raise unavailable(f"This protocol is restricted, expecting header '{lacking}'")


def restrict_method(method: Method, restrictions: Restrictions) -> Method:
    """The method with access control, before anything is read from a stream."""
    if method.category not in restrictions:
        return method
    if isinstance(method, StreamMethod):
        open_stream = method.open_stream

        def open_restricted(writer: StreamWriter, context: RpcContext) -> StreamHandler:
            check_restriction(restrictions, method.category, context)
            return open_stream(writer, context)

        return dataclasses.replace(method, open_stream=open_restricted)
    handler = method.handler

    async def handle_restricted(data: bytes, context: RpcContext) -> bytes:
        check_restriction(restrictions, method.category, context)
        return await handler(data, context)

    return dataclasses.replace(method, handler=handle_restricted)
