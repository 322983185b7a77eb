"""What a gRPC engine is given: methods and their handlers, status numbers, options."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from host.errors import ErrorCode, HostError, internal
from host.frontends.forwarding import Header
from host.frontends.tls import TlsFiles

_log = logging.getLogger("pbhost")

GRPC_STATUS = {
    ErrorCode.CANCELLED: 1,
    ErrorCode.UNKNOWN: 2,
    ErrorCode.INVALID_ARG: 3,
    ErrorCode.NOT_FOUND: 5,
    ErrorCode.ALREADY_EXISTS: 6,
    ErrorCode.UNSUPPORTED: 12,
    ErrorCode.INTERNAL: 13,
    ErrorCode.UNAVAILABLE: 14,
}
"""gRPC status number of each kind of failure."""


class RpcContext(Protocol):
    """What a handler may ask the engine about its RPC."""

    def metadata(self, key: str) -> str | None:
        """Value of a metadata key (lowercase) that the client sent, None if it did not."""

    def invocation_metadata(self) -> Sequence[Header]:
        """All that the client and its transport sent."""


class EmptyContext:
    """The context of an RPC that nobody sent."""

    def metadata(self, key: str) -> str | None:
        """None."""
        return None

    def invocation_metadata(self) -> Sequence[Header]:
        """None."""
        return ()


EMPTY_CONTEXT = EmptyContext()


class Cancellable(Protocol):
    """Work that somebody waits for."""

    def cancel(self) -> object:
        """Nobody does any more."""


ResponseCallback = Callable[[bytes | HostError], None]
"""Takes the message to answer with, or what failed instead."""


class StreamWriter(Protocol):
    """The other end of a stream, as its engine offers it to what serves the stream."""

    def write_message(self, message: bytes, more: bool) -> bool:
        """Send a message; `more` may come soon. Whether the next one may be written at once:
        otherwise `resume_writing` is called when this one has left, or little enough waits."""

    def resume_reading(self) -> None:
        """After a message that was taken as the last one for now: the next may come."""

    def finish_stream(self, error: Exception | None = None) -> None:
        """End the stream, with what failed if anything did. Nothing is called after that."""


class StreamHandler(Protocol):
    """What serves one stream, as the engine drives it: by plain calls, one inside of the other."""

    def message_received(self, message: bytes) -> bool:
        """Take a message; whether the next one may come before `resume_reading` is called."""

    def half_closed(self) -> None:
        """The client has said all."""

    def resume_writing(self) -> None:
        """There is room again."""

    def cancel(self) -> None:
        """The client has gone, or the engine has ended the stream: nobody is to be told of it."""


UnaryHandler = Callable[[bytes, RpcContext], Awaitable[bytes]]
CallbackHandler = Callable[[bytes, ResponseCallback, RpcContext], Cancellable]
StreamHandlerFactory = Callable[[StreamWriter, RpcContext], StreamHandler]


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """An RPC with one request and one response.

    The handler takes and returns message bytes, raises HostError for a failure, and is cancelled
    when the client has gone or its deadline has passed. `category` is what may be restricted.
    `callback_handler`, if there is one, does the same without a coroutine: it calls its
    second argument once,
    maybe before it returns.
    """

    name: str
    handler: UnaryHandler
    category: str
    callback_handler: CallbackHandler | None = None


@dataclass(frozen=True, slots=True)
class StreamMethod:
    """An RPC with messages both ways. `open_stream` raises HostError if there is no stream."""

    name: str
    open_stream: StreamHandlerFactory
    category: str


Method = UnaryMethod | StreamMethod
Services = dict[str, list[Method]]
"""Methods of each service, by its full name; the path of one is `/{service}/{method}`."""


def to_host_error(error: BaseException) -> HostError:
    """What a client is told of what a handler raised. A bug is logged with its traceback."""
    if isinstance(error, HostError):
        return error
    _log.error("unexpected failure of a gRPC handler", exc_info=error)
    return internal(f"unexpected failure: {type(error).__name__}")


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """Options of an engine; times are in milliseconds, 0 for an age means no limit (spec 2.6).

    `compression_level` is none, low, medium or high. With `tls`, a file that cannot be read counts
    as empty.
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
