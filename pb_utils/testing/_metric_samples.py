"""The custom metrics of a model in a test."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from pb_utils._exceptions import TritonModelException
from pb_utils._metrics import MetricKind
from pb_utils._model_texts import (
    BUCKETS_NOT_SORTED,
    KIND_DIFFERS,
    LABEL_NO_TEXT,
    invalid_metric_name,
)

_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = "[a-zA-Z_][a-zA-Z0-9_]*"


class MetricSample(NamedTuple):
    """A metric as a scrape would show it now.

    Attributes:
        family: name of the metric family.
        kind: kind of the metric.
        labels: labels of the metric.
        value: the value; for a histogram, the sum of the observations.
        observations: the observations of a histogram, in their order.
    """

    family: str
    kind: MetricKind
    labels: dict[str, str]
    value: float
    observations: list[float]


class _Series:
    """The value that all metrics with the same family name and labels share."""

    def __init__(self, family: str, kind: MetricKind, labels: dict[str, str]) -> None:
        self.family = family
        self.kind = kind
        self.labels = labels
        self.value = 0.0
        self.observations: list[float] = []


class Metrics:
    """The metrics of one harness. Error texts are those of a server, without its prefix."""

    def __init__(self) -> None:
        """Creates an empty registry."""
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._kinds: dict[str, MetricKind] = {}
        self._families: dict[int, str] = {}
        self._series: dict[int, _Series] = {}

    def new_family(self, name: str, kind: int) -> int:
        """Registers a family and returns its number.

        Raises:
            TritonModelException: the name is invalid, or belongs to a family of another kind.
        """
        _check_name("metric", name, _NAME)
        with self._lock:
            if self._kinds.setdefault(name, MetricKind(kind)) is not MetricKind(kind):
                raise TritonModelException(KIND_DIFFERS)
            number = next(self._numbers)
            self._families[number] = name
            return number

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Sequence[float] | None
    ) -> int:
        """Creates a metric, or another reference to an existing one. Returns its number.

        Raises:
            TritonModelException: the labels or the buckets are invalid.
        """
        texts: dict[str, str] = {}
        for label, value in labels.items():
            if not isinstance(value, str):
                raise TritonModelException(LABEL_NO_TEXT)
            _check_name("label", label, _LABEL)
            texts[label] = value
        bounds = list(buckets or ())
        if any(map(math.isnan, bounds)) or any(a >= b for a, b in zip(bounds, bounds[1:])):
            raise TritonModelException(BUCKETS_NOT_SORTED)
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
        """Changes a value; ``change`` is ``increment``, ``set`` or ``observe``."""
        with self._lock:
            series = self._series[metric]
            if change == "set":
                series.value = value
                return
            series.value += value
            if change == "observe":
                series.observations.append(value)

    def read(self, metric: int) -> float:
        """Returns the value of a metric."""
        return self._series[metric].value

    def drop(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Removes families and metrics. Finalisers call this, so it takes no lock."""
        for family in families:
            self._families.pop(family, None)
        for metric in metrics:
            self._series.pop(metric, None)

    def samples(self) -> list[MetricSample]:
        """Returns all metrics that a scrape would show."""
        distinct: dict[int, _Series] = {id(s): s for s in list(self._series.values())}
        return [
            MetricSample(s.family, s.kind, dict(s.labels), s.value, list(s.observations))
            for s in distinct.values()
        ]

    def sample(self, family: str, labels: Mapping[str, str]) -> MetricSample:
        """Returns the metric with this family name and exactly these labels.

        Raises:
            TritonModelException: there is no such metric.
        """
        samples = self.samples()
        for sample in samples:
            if (sample.family, sample.labels) == (family, dict(labels)):
                return sample
        existing: list[tuple[str, Any]] = [(sample.family, sample.labels) for sample in samples]
        raise TritonModelException(
            f"The model has no metric '{family}' with the labels {dict(labels)}; "
            f"its metrics are {existing}."
        )


def _check_name(what: str, name: str, pattern: str) -> None:
    if name.startswith("__") or not re.fullmatch(pattern, name):
        raise TritonModelException(invalid_metric_name(what, name, pattern))
