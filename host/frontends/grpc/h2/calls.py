"""gRPC calls on HTTP/2 streams: the base of unary and streaming calls, and refused calls."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from host.frontends.grpc.h2 import frames, status
from host.frontends.grpc.h2.frames import H2ErrorCode
from host.frontends.grpc.h2.rpc import Rpc
from host.frontends.grpc.h2.status import RpcError, StatusCode
from host.frontends.grpc.h2.stream import Stream, StreamConnection
from host.frontends.grpc.methods import (
    GRPC_STATUS,
    RETRY_METADATA,
    Cancellable,
    retry_milliseconds,
    to_host_error,
)
from host.frontends.receive_memory import Piece

OK_TRAILERS = status.trailers(0)
_HEAD, _TAIL = status.RESPONSE_HEADERS, OK_TRAILERS
# The frames of a response, and the prefix of its message.
_RESPONSE_START = struct.Struct(f">5sI{len(_HEAD)}sIBIBI")
_RESPONSE_END = struct.Struct(f">5sI{len(_TAIL)}s")
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
    _deadline: asyncio.TimerHandle | None = None
    _headers_sent = False

    def on_opened(self) -> None:
        """Starts the deadline."""
        timeout = self.rpc.timeout
        if timeout is not None:
            self._deadline = self.connection.loop.call_later(timeout, self._deadline_exceeded)

    def on_aborted(self) -> None:
        """Cancels the handler, as the client or the connection has gone."""
        self._cancel_deadline()
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
                status.response_headers(encoding) if encoding else status.RESPONSE_HEADERS
            )

    def _send_error(self, error: BaseException) -> None:
        """Ends the call with the status of an error."""
        if self.closed:
            return
        self._cancel_deadline()
        if isinstance(error, RpcError):
            code, text = int(error.code), error.message
        else:
            host_error = to_host_error(error)
            code, text = GRPC_STATUS[host_error.code], host_error.message
        list_size = self.connection.send_buffer.max_header_list_size
        most = _MAX_STATUS_MESSAGE
        if list_size:
            most = min(most, max(_MIN_STATUS_MESSAGE, list_size // 2 - _STATUS_OVERHEAD))
        block = status.trailers(code, text, most)
        retry = retry_milliseconds(error)
        if retry is not None:
            block += status.hpack_field(RETRY_METADATA, b"%d" % retry)
        self.send_trailers(block if self._headers_sent else status.RESPONSE_HEADERS + block)
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

    def _deadline_exceeded(self) -> None:
        self._deadline = None
        self._end_and_cancel(RpcError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


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
