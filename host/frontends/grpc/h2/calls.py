"""gRPC calls on HTTP/2 streams: header fields, the base of all calls, and refused calls."""

from __future__ import annotations

import base64
import functools
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from host.frontends.error_status import GRPC_STATUS, RETRY_METADATA, retry_milliseconds
from host.frontends.grpc.h2 import frames, grpc_messages
from host.frontends.grpc.h2.frames import H2ErrorCode
from host.frontends.grpc.h2.grpc_messages import ENCODINGS, RpcError, StatusCode, read_timeout
from host.frontends.grpc.h2.h2_stream import NO_DEADLINE, Stream, StreamConnection
from host.frontends.grpc.h2.headers import Fields
from host.frontends.grpc.h2.hpack import Field
from host.frontends.grpc.methods import Method, to_host_error
from host.frontends.inference_core import Cancellable
from host.frontends.receive_memory import Piece
from host.frontends.request_headers import Header
from host.lane import encode_message

_BINARY = b"-bin"
_TRANSPORT_HEADERS = frozenset((b"te", b"content-type"))
# The order in which grpcio chooses at each level among the encodings that a client accepts.
_PREFERENCES = {"low": ("gzip", "deflate"), "medium": ("deflate", "gzip")}
_PREFERENCES["high"] = _PREFERENCES["medium"]


MethodT = TypeVar("MethodT", bound=Method, covariant=True)


class Rpc(msgspec.Struct, Generic[MethodT]):
    """The parsed header of a call; also the RpcContext of its handler.

    `timeout` is in seconds. `encoding` is the compression of the request messages,
    `response_encoding` that of the response messages; empty means none. `fields` are all fields.
    """

    method: MethodT
    timeout: float | None = None
    encoding: str = ""
    response_encoding: str = ""
    fields: Sequence[Field] = ()

    def metadata(self, key: str) -> str | None:
        """Returns the value of a metadata key, or None if it is missing or binary."""
        wanted = key.encode()
        if not _is_metadata(wanted) or wanted.endswith(_BINARY):
            return None
        for name, value in self.fields:
            if name == wanted:
                return value.decode("latin-1")
        return None

    def invocation_metadata(self) -> Sequence[Header]:
        """Returns all metadata; values of `-bin` keys are bytes."""
        return tuple(_decode_metadata(*field) for field in self.fields if _is_metadata(field[0]))


def parse_rpc(fields: Fields, methods: dict[bytes, Method], compression_level: str) -> Rpc[Method]:
    """Parses the fields of a request with a gRPC content type. Raises RpcError."""
    known = dict(reversed(fields))  # the first value counts, as in grpcio
    method = methods.get(known[b":path"])
    if method is None:
        path = known[b":path"].decode("latin-1")
        raise RpcError(StatusCode.UNIMPLEMENTED, f"Method not found: {path}")
    if known.get(b"te") != b"trailers":
        raise RpcError(
            StatusCode.INTERNAL, "expected the header 'te: trailers', as gRPC asks for it"
        )
    encoding = known.get(b"grpc-encoding", b"identity").decode("latin-1")
    if encoding not in ENCODINGS and encoding != "identity":
        raise RpcError(
            StatusCode.UNIMPLEMENTED,
            f"grpc-encoding '{encoding}' is not supported, expected identity, deflate or gzip",
        )
    timeout = _parse_timeout(known.get(b"grpc-timeout"))
    for field in fields:
        if field[0].endswith(_BINARY) and _is_metadata(field[0]):
            _decode_metadata(*field)  # the request is refused if it is wrong
    return Rpc(
        method,
        timeout,
        encoding,
        _choose_response_encoding(known.get(b"grpc-accept-encoding", b""), compression_level),
        fields,
    )


def _is_metadata(name: bytes) -> bool:
    """Whether a field is metadata: not part of HTTP or gRPC themselves, as in grpcio."""
    return name[:1] != b":" and not name.startswith(b"grpc-") and name not in _TRANSPORT_HEADERS


def _decode_metadata(name_bytes: bytes, value: bytes) -> Header:
    """Raises RpcError."""
    name = name_bytes.decode()
    if not name_bytes.endswith(_BINARY):
        return name, value.decode("latin-1")
    try:
        # Clients omit the padding, and may join several values with commas.
        padded = (part.strip() + b"=" * (-len(part.strip()) % 4) for part in value.split(b","))
        return name, b",".join(base64.b64decode(part, validate=True) for part in padded)
    except ValueError:
        raise RpcError(StatusCode.INTERNAL, f"metadata '{name}' is not in base64") from None


def _parse_timeout(value: bytes | None) -> float | None:
    if value is None:
        return None
    timeout = read_timeout(value)
    if timeout is None:
        text = value.decode("latin-1")
        raise RpcError(
            StatusCode.INTERNAL,
            f"grpc-timeout '{text}' is not up to 8 digits and one of H M S m u n",
        )
    return timeout


def _choose_response_encoding(accepted: bytes, level: str) -> str:
    preferences = _PREFERENCES.get(level)
    if preferences is None:
        return ""
    names = {name.strip() for name in accepted.decode("latin-1").split(",")}
    return next((name for name in preferences if name in names), "")


OK_TRAILERS = grpc_messages.trailers(0)
_HEAD, _TAIL = grpc_messages.RESPONSE_HEADERS, OK_TRAILERS
# The frames of a response, and the prefix of its message.
_RESPONSE_START = struct.Struct(f">5sI{len(_HEAD)}sIBIBI")
_RESPONSE_END = struct.Struct(f">5sI{len(_TAIL)}s")
_MESSAGE_START = struct.Struct(">IBIBI")
_HEADERS_START = frames.frame_header(len(_HEAD), frames.HEADERS, frames.END_HEADERS, 0)[:5]
_TRAILERS_START = frames.frame_header(
    len(_TAIL), frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 0
)[:5]
_TOO_SLOW = "The request did not arrive in time"
SERVER_STOPPED = "the server has stopped before it could answer"
# gRPC's clients may drop a response whose fields take more than half of what they announce.
_STATUS_OVERHEAD = 256  # bytes of the other fields, with 32 more for each
_MIN_STATUS_MESSAGE, _MAX_STATUS_MESSAGE = 64, 65536  # bytes


class GrpcCall(Stream):
    """Base class of unary and streaming calls: the deadline, and how a call ends."""

    rpc: Rpc[Any]
    _running: Cancellable | None = None
    _headers_sent = False

    def on_opened(self) -> None:
        """Starts the deadline."""
        timeout = self.rpc.timeout
        if timeout is not None:
            connection = self.connection
            deadline = self.deadline = connection.loop.time() + timeout
            if deadline < connection.deadlines_due:
                connection.watch_deadlines(deadline, timeout)

    def on_aborted(self) -> None:
        """Cancels the handler, as the client or the connection has gone."""
        self._cancel_handler()

    def end_unavailable(self, text: str = SERVER_STOPPED) -> None:
        """Ends the call with UNAVAILABLE and cancels the handler."""
        self._end_and_cancel(RpcError(StatusCode.UNAVAILABLE, text))

    def on_too_slow(self) -> None:
        """Ends the call with DEADLINE_EXCEEDED, as the request arrived too slowly."""
        self._end_and_cancel(RpcError(StatusCode.DEADLINE_EXCEEDED, _TOO_SLOW))
        self.connection.send_buffer.flush()

    def _send_response_headers(self) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            encoding = self.rpc.response_encoding
            self.send_headers(
                grpc_messages.response_headers(encoding)
                if encoding
                else grpc_messages.RESPONSE_HEADERS
            )

    def _send_error(self, error: BaseException) -> None:
        """Ends the call with the status of an error."""
        if self.closed:
            return
        self.deadline = NO_DEADLINE
        if isinstance(error, RpcError):
            code, text = int(error.code), error.message
        else:
            host_error = to_host_error(error)
            code, text = GRPC_STATUS[host_error.code], host_error.message
        list_size = self.connection.send_buffer.max_header_list_size
        most = _MAX_STATUS_MESSAGE
        if list_size:
            most = min(most, max(_MIN_STATUS_MESSAGE, list_size // 2 - _STATUS_OVERHEAD))
        block = grpc_messages.trailers(code, text, most)
        retry = retry_milliseconds(error)
        if retry is not None:
            block += grpc_messages.hpack_field(RETRY_METADATA, b"%d" % retry)
        self.send_trailers(block if self._headers_sent else grpc_messages.RESPONSE_HEADERS + block)
        self.connection.send_buffer.flush()

    def _end_and_cancel(self, fault: RpcError) -> None:
        """Ends the call with a status and cancels the handler."""
        if self.pending_bytes:  # the client is not reading, so it would not get a status
            self.reset(H2ErrorCode.CANCEL)
            self.connection.send_buffer.flush()
        else:
            self._send_error(fault)
        self._cancel_handler()

    def _cancel_handler(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    def on_deadline(self) -> None:
        """Ends the call with DEADLINE_EXCEEDED."""
        self._end_and_cancel(RpcError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))


def encode_response(stream: int, message: bytes) -> bytes:
    """Encodes a whole response, neither compressed nor too long for a frame."""
    length = len(message)
    return b"".join(
        (
            # The header of the DATA frame starts with its size, and its kind, which is 0.
            _RESPONSE_START.pack(
                _HEADERS_START, stream, _HEAD, length + 5 << 8, 0, stream, 0, length
            ),
            message,
            _RESPONSE_END.pack(_TRAILERS_START, stream, _TAIL),
        )
    )


def encode_stream_message(stream: int, message: bytes) -> bytes:
    """Encodes a message of a stream, neither compressed nor too long for a frame."""
    length = len(message)
    return _MESSAGE_START.pack(length + 5 << 8, 0, stream, 0, length) + message


encode_small_response = encode_response
"""As `encode_response`, in compiled code if it is there."""
encode_small_message = encode_stream_message
"""As `encode_stream_message`, in compiled code if it is there."""
if encode_message is not None:
    encode_small_response = functools.partial(
        encode_message,
        frames.headers(0, _HEAD, False, frames.DEFAULT_MAX_FRAME),
        frames.headers(0, _TAIL, True, frames.DEFAULT_MAX_FRAME),
    )
    encode_small_message = functools.partial(encode_message, b"", b"")


class RefusedCall(Stream):
    """A request that is answered with an error before its data is read."""

    def __init__(self, block: bytes, connection: StreamConnection, stream_id: int) -> None:
        super().__init__(None, None, connection, stream_id)
        self._block = block

    def on_opened(self) -> None:
        """Sends the error."""
        self.send_trailers(self._block)

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Drops the data."""
        self.acknowledge_received_data(size)

    def on_aborted(self) -> None:
        """Does nothing: no work was started."""
