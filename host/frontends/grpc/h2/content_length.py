"""Calls with a content-length header, which their data must match (RFC 9113 8.1.1)."""

from __future__ import annotations

from host.frontends.grpc.h2.calls import StreamCall, UnaryCall
from host.frontends.grpc.h2.frames import H2ErrorCode
from host.frontends.grpc.h2.reader import Piece
from host.frontends.grpc.h2.stream import Stream


class _ContentLengthCheck(Stream):
    """Resets a stream whose data does not match its content-length; padding does not count.

    Few gRPC clients send that header, so calls without it have no check.
    """

    remaining_length = 0

    def _check_length(self, piece: Piece, size: int, end: bool) -> bool:
        """Whether this data is allowed; otherwise the stream is reset."""
        self.remaining_length -= len(piece)
        if self.remaining_length >= 0 and not (end and self.remaining_length):
            return True
        self.acknowledge_received_data(size)
        self.connection.on_stream_error(self.id, H2ErrorCode.PROTOCOL_ERROR)
        return False


class CheckedUnaryCall(_ContentLengthCheck, UnaryCall):
    """A unary call with a content-length, which `remaining_length` must be set to."""

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Starts the handler once the message is there."""
        if self._check_length(piece, size, end):
            super().on_data(piece, size, end)


class CheckedStreamCall(_ContentLengthCheck, StreamCall):
    """A stream with a content-length, which `remaining_length` must be set to."""

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Passes on complete messages."""
        if self._check_length(piece, size, end):
            super().on_data(piece, size, end)
