"""Calls whose data must match their content-length (RFC 9113 section 8.1.1)."""

from __future__ import annotations

from host.frontends.grpc.h2.frames import H2ErrorCode
from host.frontends.grpc.h2.stream import Stream
from host.frontends.grpc.h2.stream_call import StreamCall
from host.frontends.grpc.h2.unary_call import UnaryCall
from host.frontends.receive_buffer import Piece


class _ContentLengthCheck(Stream):
    """Resets a stream whose data, without padding, is longer or shorter than its content-length.

    A class of its own keeps the check out of ordinary calls: few gRPC clients send the field.
    """

    remaining_length = 0

    def _check_length(self, piece: Piece, size: int, end: bool) -> bool:
        """Returns whether the length is right so far; resets the stream if not."""
        self.remaining_length -= len(piece)
        if self.remaining_length >= 0 and not (end and self.remaining_length):
            return True
        self.acknowledge_received_data(size)
        self.connection.on_stream_error(self.id, H2ErrorCode.PROTOCOL_ERROR)
        return False


class CheckedUnaryCall(_ContentLengthCheck, UnaryCall):
    """A unary call with a content-length. The route sets `remaining_length` to it."""

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Checks the length, then handles the data."""
        if self._check_length(piece, size, end):
            super().on_data(piece, size, end)


class CheckedStreamCall(_ContentLengthCheck, StreamCall):
    """A streaming call with a content-length. The route sets `remaining_length` to it."""

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Checks the length, then handles the data."""
        if self._check_length(piece, size, end):
            super().on_data(piece, size, end)
