"""The minimum data rate of requests in transmission."""

from __future__ import annotations

from collections.abc import Mapping

from host.frontends.grpc.h2.limits import ConnectionLimits
from host.frontends.grpc.h2.reader import FrameReader
from host.frontends.grpc.h2.stream import Stream

_FRAME_KEY = 0  # the key of an incomplete frame, as no stream has this number


class MinDataRate:
    """Remembers how far the incomplete requests and frames of one connection were at the last
    check."""

    def __init__(
        self, streams: Mapping[int, Stream], reader: FrameReader, limits: ConnectionLimits
    ) -> None:
        self._streams = streams
        self._reader = reader
        self._min_bytes = limits.min_interval_bytes
        self._last_counts: dict[int, int] = {}  # bytes by stream

    def reset_slow_streams(self, window: int) -> bool:
        """Resets streams that have received too little since the last check.

        Returns whether that holds for an incomplete frame. `window`: the connection's window;
        without any, the client cannot send.
        """
        now: dict[int, int] = {}
        if window >= self._min_bytes:
            there = ((number, stream.incoming_bytes) for number, stream in self._streams.items())
            now = {number: size for number, size in there if size is not None}
            if self._reader.in_frame:
                now[_FRAME_KEY] = self._reader.bytes_received
        before, self._last_counts = self._last_counts, now
        slow = [n for n, size in now.items() if n in before and size - before[n] < self._min_bytes]
        for number in slow:
            if number in self._streams:
                self._streams[number].on_too_slow()
        return _FRAME_KEY in slow
