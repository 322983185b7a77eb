"""The limit on PINGs of a client, by the rules of grpc's own servers."""

from __future__ import annotations

from host.frontends.grpc.methods import GrpcOptions

_MIN_INTERVAL_WITHOUT_CALLS = 7200.0  # seconds between pings of a client without an open call


class PingPolicy:
    """Counts strikes: pings that come too soon after another, with no data sent in between."""

    __slots__ = ("_options", "_strikes", "_last_ping_at", "_sent_data")

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self._strikes = 0
        self._last_ping_at = float("-inf")
        self._sent_data = -1

    def received_ping(self, now: float, sent_data: int, without_calls: bool) -> bool:
        """Called with a ping at `now` (seconds), after `sent_data` frames; returns whether it is
        too many."""
        options = self._options
        if sent_data != self._sent_data:
            self._sent_data, self._strikes, self._last_ping_at = sent_data, 0, float("-inf")
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
