"""Latencies of a model's requests: quantiles of the last minute, and a histogram."""

from __future__ import annotations

import logging
import math
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import frexp, ldexp

import numpy as np

from host.config.schema import ModelConfig
from host.inference.call import Call
from host.metrics.family import Histogram
from host.metrics.settings import MetricsSettings

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


_log = logging.getLogger("pbhost")

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_FIRST_RESPONSE_BOUNDS = (100.0, 500.0, 2000.0, 5000.0)  # milliseconds

_SLICES, _SLICE_SECONDS = 5, 12.0  # the time window of quantiles
_MAX_SLICE_VALUES = 10_000  # values stored per slice


class _Slice:
    """The values of one part of the time window; a random sample if there are too many."""

    __slots__ = ("values", "count")

    def __init__(self) -> None:
        self.values = array("q")
        self.count = 0

    def add(self, value: int) -> None:
        self.count += 1
        if len(self.values) < _MAX_SLICE_VALUES:
            self.values.append(value)
        elif (place := random.randrange(self.count)) < _MAX_SLICE_VALUES:
            self.values[place] = value


class Summary:
    """Count and sum of all observations, and quantiles over the last minute.

    Quantiles are exact up to 10,000 values in 12 seconds. Above that they are estimated from a
    random sample, and their rank is off by a few thousandths.
    """

    def __init__(
        self, quantiles: Sequence[float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = 0
        self.total = 0
        self._quantiles = quantiles
        self._clock = clock
        self._slices = deque((_Slice() for _ in range(_SLICES)), maxlen=_SLICES)
        self._slice_end = clock() + _SLICE_SECONDS

    def observe(self, value: int) -> None:
        """Adds a value."""
        self._rotate_slices()
        self.count += 1
        self.total += value
        self._slices[-1].add(value)

    def quantiles(self) -> list[tuple[float, float]]:
        """(quantile, value) pairs; the values are NaN without observations in the last minute."""
        self._rotate_slices()
        slices = [part for part in self._slices if part.count]
        if not slices:
            return [(wanted, math.nan) for wanted in self._quantiles]
        values = np.concatenate([np.asarray(part.values) for part in slices])
        weights = np.repeat(
            [part.count / len(part.values) for part in slices],
            [len(part.values) for part in slices],
        )
        order = np.argsort(values)
        ranks = np.cumsum(weights[order])
        wanted = np.asarray(self._quantiles) * ranks[-1]
        # Half an observation is subtracted because sums of weights have rounding errors.
        places = np.searchsorted(ranks, np.maximum(wanted - 0.5, 0.0))
        found = values[order][np.minimum(places, len(values) - 1)]
        return list(zip(self._quantiles, map(float, found), strict=True))

    def _rotate_slices(self) -> None:
        """Starts new slices if the time of the current one is over."""
        now = self._clock()
        if now < self._slice_end:
            return
        due = int((now - self._slice_end) / _SLICE_SECONDS) + 1
        self._slices.extend(_Slice() for _ in range(min(due, _SLICES)))
        self._slice_end += due * _SLICE_SECONDS


class Latencies:
    """The summaries and the histogram of one model version that `--metrics-config` enables.

    Summaries are in microseconds, the histogram of first responses is in milliseconds.
    """

    def __init__(self, config: ModelConfig, settings: MetricsSettings) -> None:
        def summary() -> Summary | None:
            return Summary(settings.quantiles) if settings.summary_latencies else None

        self.request, self.queue = summary(), summary()
        self.compute_input, self.compute_infer = summary(), summary()
        self.compute_output = summary()
        self.cache_hit, self.cache_miss = summary(), summary()
        self.first_response: Histogram | None = None
        if settings.histogram_latencies:
            self.first_response = Histogram(first_response_bounds(config))

    def record_success(
        self, total_ns: int, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Records a request that the model answered."""
        for summary, ns in (
            (self.request, total_ns),
            (self.queue, queue_ns),
            (self.compute_input, input_ns),
            (self.compute_infer, infer_ns),
            (self.compute_output, output_ns),
        ):
            if summary is not None:
                summary.observe(max(0, ns) // 1000)

    def record_cache_hit(self, queue_ns: int, lookup_ns: int) -> None:
        """Records a request that was answered from the response cache."""
        for summary, ns in ((self.queue, queue_ns), (self.cache_hit, lookup_ns)):
            if summary is not None:
                summary.observe(max(0, ns) // 1000)

    def record_cache_miss(self, lookup_and_insert_ns: int) -> None:
        """Records a successful request that was not in the response cache."""
        if self.cache_miss is not None:
            self.cache_miss.observe(lookup_and_insert_ns // 1000)

    def inherit_from(self, predecessor: Latencies) -> None:
        """Continues the summaries and the histogram of the version that this one replaces."""
        for name in (
            *("request", "queue", "compute_input", "compute_infer", "compute_output"),
            *("cache_hit", "cache_miss"),
        ):
            if getattr(self, name) is not None and getattr(predecessor, name) is not None:
                setattr(self, name, getattr(predecessor, name))
        mine, other = self.first_response, predecessor.first_response
        if mine is not None and other is not None and mine.bounds == other.bounds:
            self.first_response = other

    def record_first_response(self, call: Call) -> None:
        """Records the first response of a request."""
        if self.first_response is not None and not call.failed:
            self.first_response.observe((time.monotonic_ns() - call.received_ns) // 1_000_000)


def first_response_bounds(config: ModelConfig) -> tuple[float, ...]:
    """The bucket bounds of the first-response histogram, from `model_metrics` if it is set."""
    bounds = _FIRST_RESPONSE_BOUNDS
    for control in config.model_metrics.metric_control:
        family = control.metric_identifier.family
        if family == FIRST_RESPONSE:
            bounds = tuple(sorted(set(control.histogram_options.buckets)))
        else:
            _log.warning(
                "Metric family '%s' in 'metric_identifier' is not a customizable metric in Triton"
                " core.",
                family,
            )
    return bounds
