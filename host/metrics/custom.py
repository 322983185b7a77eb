"""Custom metrics of models: families shared by name, values shared by labels, across all stubs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from host.errors import invalid_argument, not_found
from host.metrics.families import CATALOGUE, Histogram, Labels, MetricFamily, MetricKind, labels_of
from pb_utils import _model_texts as texts

_KINDS = (MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM)
"""Kinds by their numbers (docs/reference/model-module.md, "Metrics")."""

_SUPPORTED_KINDS = {
    "increment": (MetricKind.COUNTER, MetricKind.GAUGE),
    "set": (MetricKind.GAUGE,),
    "observe": (MetricKind.HISTOGRAM,),
    "value": (MetricKind.COUNTER, MetricKind.GAUGE),
}

_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class _Series:
    """The value of one label set of a family, with the number of `_FamilyObject`s that hold it."""

    __slots__ = ("value", "histogram", "reference_count")

    def __init__(self, bounds: Sequence[float] | None) -> None:
        self.value = 0.0
        self.histogram = None if bounds is None else Histogram(bounds)
        self.reference_count = 0


@dataclass(slots=True)
class _SharedFamily:
    """A family by its name: all family objects of this name share it. It is never removed."""

    name: str
    help: str
    kind: MetricKind
    series: dict[Labels, _Series] = field(default_factory=dict)


@dataclass(slots=True)
class _FamilyObject:
    """One `pb_utils.MetricFamily` object in a stub.

    It holds every label set that a metric object of it has used, until it is released itself.
    """

    shared: _SharedFamily
    labels: set[Labels] = field(default_factory=set)
    metrics: set[int] = field(default_factory=set)  # its metric objects that are not released

    def hold_series(self, labels: Labels, bounds: Sequence[float] | None) -> _Series:
        """The series of a label set, created if no family object holds it."""
        series = self.shared.series.get(labels)
        if series is None:
            series = self.shared.series[labels] = _Series(bounds)
        if labels not in self.labels:
            self.labels.add(labels)
            series.reference_count += 1
        return series

    def release_series(self) -> None:
        """Removes every series that no other family object holds."""
        for labels in self.labels:
            series = self.shared.series[labels]
            series.reference_count -= 1
            if not series.reference_count:
                del self.shared.series[labels]


@dataclass(slots=True)
class _MetricObject:
    """One `pb_utils.Metric` object in a stub. Several may write to the same series."""

    family: _FamilyObject
    series: _Series

    def check_supported(self, operation: str, error: Callable[[str], Exception]) -> None:
        """Raises `error` unless metrics of this kind have the operation."""
        kind = self.family.shared.kind
        if kind not in _SUPPORTED_KINDS[operation]:
            name = operation.capitalize()
            raise error(f"TRITONSERVER_METRIC_KIND_{kind.name} does not support {name}")


@dataclass(slots=True)
class _OwnerObjects:
    """The objects of one stub, by the numbers that the stub chose for them."""

    families: dict[int, _FamilyObject] = field(default_factory=dict)
    metrics: dict[int, _MetricObject] = field(default_factory=dict)


class CustomMetrics:
    """The custom metrics of all models. All methods must be called on the event loop.

    The rules are in docs/reference/model-module.md, "Metrics":

    * Family objects with the same name share one family, in all stubs.
    * Metric objects with the same family name and labels share one value.
    * The value lives as long as any family object that has used its labels. Releasing a metric
      object alone keeps it.

    An `owner` is a stub; any hashable object can stand for one. It chooses the numbers of its
    family and metric objects; kinds are 0 counter, 1 gauge, 2 histogram. Errors are HostErrors with
    the texts of Triton's core; the caller adds what the model API puts around them.
    """

    def __init__(self) -> None:
        self._families: dict[str, _SharedFamily] = {}
        self._owners: dict[object, _OwnerObjects] = {}

    def new_family(
        self, owner: object, family: int, name: str, description: str, kind: int
    ) -> None:
        """Registers a family object. A family of the same name keeps its description.

        Raises HostError INVALID_ARG if the name is invalid or the family has another kind.
        """
        if not 0 <= kind < len(_KINDS):
            raise invalid_argument(
                f"Unknown metric kind {kind}; expected COUNTER, GAUGE, HISTOGRAM"
            )
        shared = self._families.get(name)
        if shared is None:
            _check_name(name)
            shared = self._families[name] = _SharedFamily(name, description, _KINDS[kind])
        elif shared.kind is not _KINDS[kind]:
            raise invalid_argument(texts.KIND_DIFFERS)
        families = self._owners.setdefault(owner, _OwnerObjects()).families
        _check_unused(family, families)
        families[family] = _FamilyObject(shared)

    def new_metric(
        self,
        owner: object,
        metric: int,
        family: int,
        labels: dict[str, str],
        buckets: list[float] | None,
    ) -> None:
        """Registers a metric object in a family object of the same owner.

        `buckets` are the upper bounds of a histogram; +Inf may be left out. If the series exists,
        it keeps its bounds. Raises HostError NOT_FOUND without the family object, INVALID_ARG for
        invalid labels or buckets.
        """
        objects = self._owners.get(owner)
        family_object = None if objects is None else objects.families.get(family)
        if objects is None or family_object is None:
            raise not_found(texts.METRIC_DELETED)
        kind = family_object.shared.kind
        key = _checked_labels(labels, kind)
        bounds = _checked_buckets(buckets, kind)
        _check_unused(metric, objects.metrics)
        series = family_object.hold_series(key, bounds)
        family_object.metrics.add(metric)
        objects.metrics[metric] = _MetricObject(family_object, series)

    def update_metric(self, owner: object, metric: int, change: str, value: float) -> None:
        """Applies `increment`, `set` or `observe`. A released metric is ignored.

        Raises ValueError if the kind does not have the change; stubs check this before they send.
        """
        found = self._find_metric(owner, metric)
        if found is None:
            return
        found.check_supported(change, ValueError)
        series = found.series
        if series.histogram is not None:
            series.histogram.observe(value)
        elif change == "set":
            series.value = value
        elif found.family.shared.kind is MetricKind.COUNTER and value < 0:
            raise ValueError(texts.COUNTER_DECREMENT)
        else:
            series.value += value

    def read_metric(self, owner: object, metric: int) -> float:
        """The value. Raises HostError NOT_FOUND, or INVALID_ARG for a histogram."""
        found = self._find_metric(owner, metric)
        if found is None:
            raise not_found(texts.METRIC_DELETED)
        found.check_supported("value", invalid_argument)
        return found.series.value

    def _find_metric(self, owner: object, metric: int) -> _MetricObject | None:
        objects = self._owners.get(owner)
        return None if objects is None else objects.metrics.get(metric)

    def release_objects(self, owner: object, families: list[int], metrics: list[int]) -> None:
        """Releases objects that the model has deleted. Unknown numbers are ignored.

        Releasing a family object also releases its metric objects.
        """
        objects = self._owners.get(owner)
        if objects is None:
            return
        for number in metrics:
            metric = objects.metrics.pop(number, None)
            if metric is not None:
                metric.family.metrics.discard(number)
        for number in families:
            family_object = objects.families.pop(number, None)
            if family_object is not None:
                for metric_number in family_object.metrics:
                    del objects.metrics[metric_number]
                family_object.release_series()
        if not objects.families:
            del self._owners[owner]

    def remove_owner(self, owner: object) -> None:
        """Releases all objects of a stub that has ended."""
        objects = self._owners.pop(owner, None)
        if objects is not None:
            for family_object in objects.families.values():
                family_object.release_series()

    def collect(self) -> Iterator[MetricFamily]:
        """Yields every family that was ever registered, in the order of first registration."""
        for shared in self._families.values():
            family = MetricFamily(shared.name, shared.help, shared.kind)
            for labels, series in sorted(shared.series.items()):
                if series.histogram is not None:
                    family.add_histogram(labels, series.histogram)
                else:
                    family.add(labels, series.value)
            yield family


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        pattern = _NAME.pattern.removeprefix("(?!__)")
        raise invalid_argument(texts.invalid_metric_name("metric", name, pattern))
    if name in CATALOGUE:
        raise invalid_argument(
            f"Metric name '{name}' is reserved for a metric of the server; choose another one"
        )


def _check_unused(number: int, numbers: Container[int]) -> None:
    if number in numbers:
        raise invalid_argument(f"number {number} is in use")


def _checked_labels(labels: dict[str, str], kind: MetricKind) -> Labels:
    for name in labels:
        if not _LABEL.fullmatch(name):
            pattern = _LABEL.pattern.removeprefix("(?!__)")
            raise invalid_argument(texts.invalid_metric_name("label", name, pattern))
        if kind is MetricKind.HISTOGRAM and name == "le":
            raise invalid_argument(
                "Invalid label name 'le'; it is reserved for the buckets of histograms"
            )
    return labels_of(labels)


def _checked_buckets(buckets: list[float] | None, kind: MetricKind) -> list[float] | None:
    if kind is not MetricKind.HISTOGRAM:
        if buckets is not None:
            raise invalid_argument("Unexpected buckets found.")
        return None
    if buckets is None:
        raise invalid_argument("Missing required buckets.")
    if any(map(math.isnan, buckets)) or any(low >= high for low, high in pairwise(buckets)):
        raise invalid_argument(texts.BUCKETS_NOT_SORTED)
    return buckets[:-1] if buckets and buckets[-1] == math.inf else buckets
