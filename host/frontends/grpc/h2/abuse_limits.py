"""Limits on clients that cost the server much: pings, cheap frames, slow requests."""

from __future__ import annotations

from collections.abc import Mapping

from host.frontends.grpc.h2.frames import H2ErrorCode
from host.frontends.grpc.h2.limits import ConnectionLimits
from host.frontends.grpc.h2.reader import FrameReader
from host.frontends.grpc.h2.stream import Stream
from host.frontends.grpc.methods import GrpcOptions

_MIN_INTERVAL_WITHOUT_CALLS = 7200.0  # seconds between pings of a client without open calls
_FRAME_KEY = 0  # the incomplete frame of a connection; no stream has this id


class PingPolicy:
    """Limits the client's pings by the rules of gRPC's own servers.

    A ping that arrives too soon after the previous one is a strike. Frames that the server sends
    reset the strikes.
    """

    __slots__ = ("_options", "_strikes", "_last_ping_at", "_data_frames_sent")

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self._strikes = 0
        self._last_ping_at = float("-inf")
        self._data_frames_sent = -1

    def received_ping(self, now: float, data_frames_sent: int, without_calls: bool) -> bool:
        """Counts a ping. Returns True if the client has sent too many.

        Args:
            now: The time of the ping in seconds.
            data_frames_sent: How many HEADERS, DATA and WINDOW_UPDATE frames the server has sent.
            without_calls: Whether the client has no open call.
        """
        options = self._options
        if data_frames_sent != self._data_frames_sent:
            self._data_frames_sent = data_frames_sent
            self._strikes, self._last_ping_at = 0, float("-inf")
        if without_calls and not options.keepalive_permit_without_calls:
            interval = _MIN_INTERVAL_WITHOUT_CALLS
        else:
            interval = options.http2_min_recv_ping_interval_without_data / 1000
        too_soon = now < self._last_ping_at + interval
        self._last_ping_at = now
        if not too_soon:
            return False
        self._strikes += 1
        most = options.http2_max_ping_strikes
        return most != 0 and self._strikes > most


class MinDataRate:
    """Requires a minimum data rate of requests and frames that have arrived in part."""

    def __init__(
        self, streams: Mapping[int, Stream], reader: FrameReader, limits: ConnectionLimits
    ) -> None:
        self._streams = streams
        self._reader = reader
        self._min_bytes = limits.min_interval_bytes
        self._last_counts: dict[int, int] = {}  # received bytes by stream at the last check
        self._last_unread: dict[int, int] = {}  # pending bytes by stream at the last check

    def reset_slow_streams(self, window: int) -> bool:
        """Ends the streams that received less than the minimum since the last check.

        Returns whether the incomplete frame of the connection was as slow. `window` is the
        connection's receive window in bytes; a client without window cannot send, and is not slow.
        """
        now: dict[int, int] = {}
        if window >= self._min_bytes:
            incoming = ((id, stream.incoming_bytes) for id, stream in self._streams.items())
            now = {id: size for id, size in incoming if size is not None}
            if self._reader.in_frame:
                now[_FRAME_KEY] = self._reader.bytes_received
        before, self._last_counts = self._last_counts, now
        slow = [id for id, n in now.items() if id in before and n - before[id] < self._min_bytes]
        for id in slow:
            if id in self._streams:
                self._streams[id].on_too_slow()
        return _FRAME_KEY in slow

    def reset_unread_responses(self) -> None:
        """Resets the streams whose client has read nothing of its response since the last check."""
        unread = ((id, stream.unread_bytes) for id, stream in self._streams.items())
        before, self._last_unread = self._last_unread, {id: size for id, size in unread if size}
        for id, size in self._last_unread.items():
            if before.get(id) == size:
                self._streams[id].reset(H2ErrorCode.CANCEL)
