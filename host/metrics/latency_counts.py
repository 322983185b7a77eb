"""Counts requests by their latency, for quantiles over any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import frexp, ldexp

_PER_OCTAVE = 16
"""Buckets between a latency and its double: the bounds of each are at most 6 % apart."""


class LatencyCounts(Counter[int]):
    """The number of requests in each bucket of latency; counts of two versions can be added."""

    def add_latencies(self, durations: Iterable[int]) -> None:
        """Adds requests of the given durations in nanoseconds."""
        for ns in durations:
            mantissa, exponent = frexp(ns)  # 0.5 <= mantissa < 1, so each exponent has 16 buckets
            self[exponent * _PER_OCTAVE + int(mantissa * 2 * _PER_OCTAVE)] += 1


def latency_buckets(counts: Counter[int]) -> list[tuple[float, int]]:
    """The upper bound in microseconds and the number of requests of each bucket, ascending."""
    return [(_upper_bound_us(place), count) for place, count in sorted(counts.items())]


@lru_cache(maxsize=2048)  # many models share the places
def _upper_bound_us(place: int) -> float:
    exponent, step = divmod(place - _PER_OCTAVE, _PER_OCTAVE)
    return round(ldexp(_PER_OCTAVE + step + 1, exponent) / (2 * _PER_OCTAVE) / 1000, 3)
