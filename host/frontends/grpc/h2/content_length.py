"""Calls that have said how long their requests are, and are held to it (RFC 9113 8.1.1)."""

from __future__ import annotations

from host.frontends.grpc.h2.calls import StreamCall, UnaryCall
from host.frontends.grpc.h2.frames import ErrorCode
from host.frontends.grpc.h2.reader import Piece
from host.frontends.grpc.h2.stream import Stream


class _Measured(Stream):
    """Resets a stream whose DATA is not as long as its content-length; padding does not count.

    Few clients of gRPC send that field, so calls without it pay nothing for it.
    """

    missing = 0

    def _fits(self, piece: Piece, size: int, end: bool) -> bool:
        """Whether there may be this piece; if not, the stream is reset."""
        self.missing -= len(piece)
        if self.missing >= 0 and not (end and self.missing):
            return True
        self.credit(size)
        self.connection.refuse(self.id, ErrorCode.PROTOCOL_ERROR)
        return False


class MeasuredUnaryCall(_Measured, UnaryCall):
    """A unary call with a content-length; `missing` is to be set to it."""

    def received(self, piece: Piece, size: int, end: bool) -> None:
        """Serve the call once its message is there."""
        if self._fits(piece, size, end):
            super().received(piece, size, end)


class MeasuredStreamCall(_Measured, StreamCall):
    """A stream with a content-length; `missing` is to be set to it."""

    def received(self, piece: Piece, size: int, end: bool) -> None:
        """Pass on the messages that are complete."""
        if self._fits(piece, size, end):
            super().received(piece, size, end)
