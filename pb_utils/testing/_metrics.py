"""The metrics of a model in a harness."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from pb_utils._metrics import MetricKind
from pb_utils._model_exception import TritonModelException

_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = "[a-zA-Z_][a-zA-Z0-9_]*"


class MetricSample(NamedTuple):
    """A metric as a scrape would show it now; ``value`` of a histogram is the sum.

    ``observations`` are those of a histogram, in their order.
    """

    family: str
    kind: MetricKind
    labels: dict[str, str]
    value: float
    observations: list[float]


class _Series:
    """What all metrics with the same labels of one family share."""

    def __init__(self, family: str, kind: MetricKind, labels: dict[str, str]) -> None:
        self.family = family
        self.kind = kind
        self.labels = labels
        self.value = 0.0
        self.observations: list[float] = []


class Metrics:
    """All families and metrics of one harness. Refusals are the server's, without its prefix."""

    def __init__(self) -> None:
        """Begin without a family."""
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._kinds: dict[str, MetricKind] = {}
        self._families: dict[int, str] = {}
        self._series: dict[int, _Series] = {}

    def new_family(self, name: str, kind: int) -> int:
        """Register a family.

        Raises:
            TritonModelException: there is one of that name and of another kind, or it is no name.
        """
        _check_name("metric", name, _NAME)
        with self._lock:
            if self._kinds.setdefault(name, MetricKind(kind)) is not MetricKind(kind):
                raise TritonModelException("Family name already exists with different type")
            number = next(self._numbers)
            self._families[number] = name
            return number

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Sequence[float] | None
    ) -> int:
        """Make a metric, or another reference to the one with these labels.

        Raises:
            TritonModelException: the labels or the buckets are not as they must be.
        """
        texts: dict[str, str] = {}
        for label, value in labels.items():
            if not isinstance(value, str):
                raise TritonModelException("attempt to access JSON non-string as string")
            _check_name("label", label, _LABEL)
            texts[label] = value
        bounds = list(buckets or ())
        if any(map(math.isnan, bounds)) or any(a >= b for a, b in zip(bounds, bounds[1:])):
            raise TritonModelException("Bucket Boundaries must be strictly sorted")
        name = self._families[family]
        with self._lock:
            number = next(self._numbers)
            for series in list(self._series.values()):
                if (series.family, series.labels) == (name, texts):
                    break
            else:
                series = _Series(name, self._kinds[name], texts)
            self._series[number] = series
            return number

    def change(self, metric: int, change: str, value: float) -> None:
        """Increment, set or observe."""
        with self._lock:
            series = self._series[metric]
            if change == "set":
                series.value = value
                return
            series.value += value
            if change == "observe":
                series.observations.append(value)

    def read(self, metric: int) -> float:
        """Return a value."""
        return self._series[metric].value

    def drop(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Forget these; called by finalisers, so without the lock."""
        for family in families:
            self._families.pop(family, None)
        for metric in metrics:
            self._series.pop(metric, None)

    def samples(self) -> list[MetricSample]:
        """Return all metrics that a scrape would show."""
        different: dict[int, _Series] = {id(s): s for s in list(self._series.values())}
        return [
            MetricSample(s.family, s.kind, dict(s.labels), s.value, list(s.observations))
            for s in different.values()
        ]

    def sample(self, family: str, labels: Mapping[str, str]) -> MetricSample:
        """Return the metric with exactly these labels.

        Raises:
            TritonModelException: there is none.
        """
        samples = self.samples()
        for sample in samples:
            if (sample.family, sample.labels) == (family, dict(labels)):
                return sample
        there: list[tuple[str, Any]] = [(sample.family, sample.labels) for sample in samples]
        raise TritonModelException(
            f"The model has no metric '{family}' with the labels {dict(labels)}; it has {there}."
        )


def _check_name(what: str, name: str, pattern: str) -> None:
    if name.startswith("__") or not re.fullmatch(pattern, name):
        raise TritonModelException(
            f"Invalid {what} name '{name}'; it must match {pattern} and not begin with '__'"
        )
