"""Histograms and summaries of latency, and the settings that select them."""

from __future__ import annotations

import logging
import math
import random
import re
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import frexp, ldexp

import numpy as np

from host.config.schema import ModelConfig
from host.inference.call import Call
from host.metrics.families import Histogram

_BOOLS = ("true", "false")
_SWITCHES = {
    "counter_latencies": "true",
    "summary_latencies": "false",
    "histogram_latencies": "false",
}

_NUMBER = re.compile(
    r"\s*([+-]?(?:0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?"
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))",
    re.ASCII,
)

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which latency metrics are shown, and the quantiles of summaries
    (docs/reference/metrics.md, "Metrics").

    `warnings` are log lines about settings that have no effect.
    """

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> MetricsSettings:
        """Parses texts `<setting>=<value>`. The last value of a repeated setting is used."""
        given = dict(text.split("=", 1) for text in texts)
        quantiles, warnings = _quantiles(given.pop("summary_quantiles", ""))
        made: dict[str, bool] = {}
        for name, default in _SWITCHES.items():
            text = given.pop(name, default)
            made[name] = (text if text in _BOOLS else default) == "true"
            if text not in _BOOLS:
                warnings.append(
                    f"--metrics-config: {name} must be true or false, got '{text}'; using {default}"
                )
        warnings += [
            f"--metrics-config: setting '{name}' is not used by this version" for name in given
        ]
        return cls(**made, quantiles=quantiles or DEFAULT_QUANTILES, warnings=tuple(warnings))


def _quantiles(text: str) -> tuple[tuple[float, ...], list[str]]:
    """Parses `<quantile>:<error>,...`; returns the valid quantiles, and warnings for the others.

    The error is the tolerance of Triton's estimate. It is not used here. As in Triton, text after a
    number is ignored.
    """
    quantiles: list[float] = []
    warnings: list[str] = []
    for part in filter(None, text.split(",")):
        try:
            quantile, error = map(_read_number, part.split(":", 1))
        except ValueError:
            quantile = error = -1.0
        if 0.0 <= quantile <= 1.0 and 0.0 <= error <= 1.0:
            quantiles.append(quantile)
        else:
            warnings.append(
                f"--metrics-config: ignoring '{part}' in summary_quantiles; expected"
                " <quantile>:<error>, both from 0 to 1"
            )
    return tuple(dict.fromkeys(quantiles)), warnings


def _read_number(text: str) -> float:
    """Reads the longest prefix that is a finite number, like `strtod` of C. Raises ValueError."""
    found = _NUMBER.match(text)
    if found is None:
        raise ValueError(text)
    return float.fromhex(found[1]) if "x" in found[1].lower() else float(found[1])


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
