"""The times between the tokens of streamed texts."""

from __future__ import annotations

import time
from collections.abc import Callable

from host.metrics.family import Histogram

TIME_TO_FIRST_TOKEN = "pbhost_time_to_first_token_seconds"
INTER_TOKEN = "pbhost_inter_token_latency_seconds"

_FIRST_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_BETWEEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class TokenLatencies:
    """Histograms of one model version, in seconds. They are empty until a text is streamed."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_FIRST_BOUNDS)
        self.inter_token = Histogram(_BETWEEN_BOUNDS)

    def histograms(self) -> dict[str, Histogram]:
        """Returns the histograms by the names of their metrics; none if no text was streamed."""
        if not any(self.time_to_first_token.counts):
            return {}
        return {TIME_TO_FIRST_TOKEN: self.time_to_first_token, INTER_TOKEN: self.inter_token}


def token_buckets(histogram: Histogram) -> list[tuple[float, int]]:
    """The upper bound in microseconds and the count of each bucket up to the last one in use.

    Times over the largest bound are in its bucket. Empty if nothing was counted.
    """
    if not any(histogram.counts):
        return []
    *counts, beyond = histogram.counts
    counts[-1] += beyond
    while not counts[-1]:
        counts.pop()
    return [
        (round(bound * 1e6), count) for bound, count in zip(histogram.bounds, counts, strict=False)
    ]


class TokenTimer:
    """Records the times of one streamed request. `clock` gives seconds."""

    def __init__(
        self,
        latencies: TokenLatencies,
        started: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._latencies = latencies
        self._started = started
        self._clock = clock
        self._last: dict[int, float] = {}

    def record_token(self, choice: int) -> None:
        """Records that the model gave the next piece of a choice."""
        now = self._clock()
        last = self._last.get(choice)
        if last is None:
            self._latencies.time_to_first_token.observe(now - self._started)
        else:
            self._latencies.inter_token.observe(now - last)
        self._last[choice] = now
