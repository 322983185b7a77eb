"""Calls that have said how long their requests are, and are held to it (RFC 9113 8.1.1)."""

from __future__ import annotations

from host.frontends.grpc.h2.calls import StreamCall, UnaryCall
from host.frontends.grpc.h2.frames import H2ErrorCode
from host.frontends.grpc.h2.reader import Piece
from host.frontends.grpc.h2.stream import Stream


class _ContentLengthCheck(Stream):
    """Resets a stream whose DATA is not as long as its content-length; padding does not count.

    Few clients of gRPC send that field, so calls without it pay nothing for it.
    """

    remaining_length = 0

    def _check_length(self, piece: Piece, size: int, end: bool) -> bool:
        """Whether there may be this piece; if not, the stream is reset."""
        self.remaining_length -= len(piece)
        if self.remaining_length >= 0 and not (end and self.remaining_length):
            return True
        self.acknowledge_received_data(size)
        self.connection.on_stream_error(self.id, H2ErrorCode.PROTOCOL_ERROR)
        return False


class CheckedUnaryCall(_ContentLengthCheck, UnaryCall):
    """A unary call with a content-length; `remaining_length` is to be set to it."""

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Serve the call once its message is there."""
        if self._check_length(piece, size, end):
            super().on_data(piece, size, end)


class CheckedStreamCall(_ContentLengthCheck, StreamCall):
    """A stream with a content-length; `remaining_length` is to be set to it."""

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Pass on the messages that are complete."""
        if self._check_length(piece, size, end):
            super().on_data(piece, size, end)
