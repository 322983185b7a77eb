"""Plain data types for metric families: samples, labels and histograms."""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
"""Label names and values, sorted by name."""


class MetricKind(enum.Enum):
    """The kind of a family. The value is the word in the TYPE line."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


@dataclass(slots=True)
class Sample:
    """One line of a scrape: `suffix` of the metric name, labels and value.

    `numeric_label` is the last label of a histogram bucket (`le`) or of a summary (`quantile`).
    """

    suffix: str
    labels: Labels
    value: float
    numeric_label: tuple[str, float] | None = None


class Histogram:
    """Counts observations per bucket. `bounds` are in strictly ascending order."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one has no bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value. Bounds are inclusive, and NaN is counted only in the last bucket."""
        place = len(self.bounds) if math.isnan(value) else bisect_left(self.bounds, value)
        self.counts[place] += times
        self.total += value * times


@dataclass(slots=True)
class MetricFamily:
    """A metric name with its help text, kind and samples."""

    name: str
    help: str
    kind: MetricKind
    samples: list[Sample] = field(default_factory=list)

    def add(self, labels: Labels, value: float) -> None:
        """Adds the value of a counter or gauge."""
        self.samples.append(Sample("", labels, value))

    def add_histogram(self, labels: Labels, histogram: Histogram) -> None:
        """Adds count, sum and cumulative buckets; the last bucket is +Inf."""
        self._add_head(labels, sum(histogram.counts), histogram.total)
        below = 0
        bounds = (*histogram.bounds, math.inf)
        for bound, count in zip(bounds, histogram.counts, strict=True):
            below += count
            self.samples.append(Sample("_bucket", labels, below, ("le", bound)))

    def add_summary(
        self, labels: Labels, count: int, total: float, quantiles: Iterable[tuple[float, float]]
    ) -> None:
        """Adds count, sum, and (quantile, value) pairs."""
        self._add_head(labels, count, total)
        for quantile, value in quantiles:
            self.samples.append(Sample("", labels, value, ("quantile", quantile)))

    def _add_head(self, labels: Labels, count: int, total: float) -> None:
        self.samples.append(Sample("_count", labels, count))
        self.samples.append(Sample("_sum", labels, total))


def labels_of(texts: Mapping[str, str]) -> Labels:
    """Converts a mapping to labels."""
    return tuple(sorted(texts.items()))
