"""Whether what a client has begun to send goes on coming."""

from __future__ import annotations

from collections.abc import Mapping

from host.frontends.grpc.h2.limits import Limits
from host.frontends.grpc.h2.reader import FrameReader
from host.frontends.grpc.h2.stream import Stream

_FRAME = 0  # stands for a frame that has come in part: no stream has that number


class Pace:
    """What of one connection's `streams` and frames was under way at the last look."""

    def __init__(self, streams: Mapping[int, Stream], reader: FrameReader, limits: Limits) -> None:
        self._streams = streams
        self._reader = reader
        self._pace = limits.pace
        self._before: dict[int, int] = {}  # bytes by stream

    def check(self, window: int) -> bool:
        """Give up streams that were under way at the last look and have hardly come on.

        Whether that holds for a frame. `window`: how much the client may send on the connection;
        with none left, nothing can come.
        """
        now: dict[int, int] = {}
        if window >= self._pace:
            there = ((number, stream.arriving) for number, stream in self._streams.items())
            now = {number: size for number, size in there if size is not None}
            if self._reader.inside:
                now[_FRAME] = self._reader.taken
        before, self._before = self._before, now
        slow = [n for n, size in now.items() if n in before and size - before[n] < self._pace]
        for number in slow:
            if number in self._streams:
                self._streams[number].too_slow()
        return _FRAME in slow
